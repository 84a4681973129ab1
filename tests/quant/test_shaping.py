"""Block factors, feedback matrices, whitening and the equalising rotation, against NumPy float64."""

import numpy as np
import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.quant.shaping import (
    FLOOR,
    block_factor,
    equalising_rotation,
    feedback_matrix,
    regularise,
    shaping_ratio,
    whitening,
)


def sensitivity(d, seed=0, spread=3.0):
    """Positive definite with eigenvalues over `spread` decades."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return torch.from_numpy((basis * 10 ** rng.uniform(-spread, 0, d)) @ basis.T)


def scalar_ldl(matrix):
    """U and D of `M = (I + U) D (I + U)^T` by elimination from the last coordinate, one at a time."""
    m, d = matrix.copy(), len(matrix)
    upper, diagonal = np.zeros_like(m), np.zeros(d)
    for k in range(d - 1, -1, -1):
        diagonal[k] = m[k, k]
        upper[:k, k] = m[:k, k] / m[k, k]
        m[:k, :k] -= diagonal[k] * np.outer(upper[:k, k], upper[:k, k])
    return upper, diagonal


@pytest.mark.parametrize("block", [1, 4, 16, 64])
def test_factor_rebuilds_the_sensitivity(block):
    m = sensitivity(64)
    upper, inner = (t.numpy() for t in block_factor(m, block))
    index = np.arange(64) // block
    np.testing.assert_allclose(
        (np.eye(64) + upper) @ inner @ (np.eye(64) + upper).T, m.numpy(), rtol=1e-9, atol=1e-12
    )
    assert np.abs(upper[index[:, None] >= index[None]]).max() < 1e-9
    assert np.abs(inner[index[:, None] != index[None]]).max(initial=0) < 1e-12
    error = np.random.default_rng(1).standard_normal(64)
    own = error @ (np.eye(64) + upper)
    np.testing.assert_allclose(own @ inner @ own, error @ m.numpy() @ error, rtol=1e-9)


def test_blocks_of_one_are_the_exact_chain():
    m = sensitivity(24, seed=2)
    upper, diagonal = scalar_ldl(m.numpy())
    found = block_factor(m, 1)
    np.testing.assert_allclose(found[0].numpy(), upper, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found[1].diagonal().numpy(), diagonal, rtol=1e-9)


@pytest.mark.parametrize("block", [1, 8])
def test_feedback_of_own_errors_is_feedback_of_latent_errors(block):
    """Subtracting `f V` of each rounding's own error f is subtracting `e U` of the latent's error e."""
    m = sensitivity(32, seed=3)
    upper, v = block_factor(m, block)[0].numpy(), feedback_matrix(m, block).numpy()
    own = np.random.default_rng(4).uniform(-0.5, 0.5, 32)
    error = np.linalg.solve((np.eye(32) + upper).T, own)
    np.testing.assert_allclose(own @ v, error @ upper, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(own - own @ v, error, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("d", "block"), [(64, 8), (128, 32), (32, 32), (48, 16)])
def test_equalising_rotation_reaches_the_geometric_mean(d, block):
    m = regularise(sensitivity(d, seed=5), 0.1)
    rotation = equalising_rotation(m, block)
    np.testing.assert_allclose((rotation.T @ rotation).numpy(), np.eye(d), atol=1e-10)
    rotated = rotation.T @ m @ rotation
    least = d * np.exp(np.linalg.slogdet(m.numpy())[1] / d) / np.trace(m.numpy())
    found = float(shaping_ratio(rotated, block))
    assert found >= least * (1 - 1e-9)
    if d > block:
        # only the block that is left over at the end is not exactly equal
        inner = block_factor(rotated, block)[1].numpy()
        mean = least * np.trace(m.numpy()) / d
        np.testing.assert_allclose(inner[block:, block:], mean * np.eye(d - block), atol=0.2 * mean)
        assert found < 0.6 * float(shaping_ratio(m, block)) + 0.4 * least


def test_layers_are_factored_together():
    batch = torch.stack([sensitivity(32, seed) for seed in range(3)])
    for layer, m in enumerate(batch):
        torch.testing.assert_close(feedback_matrix(batch, 8)[layer], feedback_matrix(m, 8))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_whitening_by_eigenvalues(power):
    covariance = sensitivity(16, seed=6, spread=5)
    matrix, inverse = whitening(covariance, power)
    values = np.linalg.eigvalsh(covariance.numpy() / np.linalg.eigvalsh(covariance.numpy()).max())
    expected = np.sort(np.maximum(values, FLOOR) ** (-power / 2))
    np.testing.assert_allclose(np.linalg.eigvalsh(matrix.numpy()), expected, rtol=1e-8)
    np.testing.assert_allclose((matrix @ inverse).numpy(), np.eye(16), atol=1e-10)


def test_regularised_trace_and_floor():
    m = torch.diag(torch.tensor([4.0, 0.0, 0.0, 0.0]))
    regular = regularise(m, 0.25)
    assert regular.diagonal().tolist() == [4.25, 0.25, 0.25, 0.25]


def test_errors():
    with pytest.raises(RolaqError, match="block of 5 does not divide the latent's 32"):
        feedback_matrix(sensitivity(32), 5)
    with pytest.raises(RolaqError, match="larger eps"):
        feedback_matrix(-torch.eye(8), 4)
