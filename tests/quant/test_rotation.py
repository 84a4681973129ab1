"""Hadamard, OSCAR's rotation, geometry and every learnable rotation against NumPy float64."""

import numpy as np
import pytest
import reference
import torch

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.geometry import cumulative_energy, energy, projections
from rolaq.quant.hadamard import block_hadamard, hadamard
from rolaq.quant.oscar import bit_reversal, oscar_rotation
from rolaq.quant.rotation import KINDS, build_rotation, random_basis

LAYERS, DIM = 2, 16


def orthogonal(*shape, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal(shape))[0]


def positive(*shape, seed=0):
    root = np.random.default_rng(seed).standard_normal(shape)
    gram = root @ np.swapaxes(root, -1, -2)
    return gram / np.trace(gram, axis1=-2, axis2=-1)[..., None, None]


BASE, ENERGIES = orthogonal(LAYERS, DIM, DIM), positive(LAYERS, 2, DIM, DIM, seed=1)


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_hadamard_is_sylvesters(size):
    np.testing.assert_allclose(hadamard(size, torch.float64).numpy(), reference.sylvester(size), atol=1e-15)


def test_block_hadamard():
    expected = np.kron(np.eye(2), reference.sylvester(8))
    np.testing.assert_allclose(block_hadamard(16, 8).numpy(), expected, atol=1e-7)


@pytest.mark.parametrize(
    "call", [lambda: hadamard(12), lambda: block_hadamard(100, 8), lambda: bit_reversal(24)]
)
def test_sizes_that_do_not_work(call):
    with pytest.raises(RolaqError):
        call()


def test_bit_reversal_deals_ranks_round_robin():
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    groups = (bit_reversal(512) // 128)[:8].tolist()
    assert sorted(groups[:4]) == [0, 1, 2, 3] and sorted(groups[4:]) == [0, 1, 2, 3]


def test_oscar_rotation():
    sigma = np.cov(np.random.default_rng(2).standard_normal((32, 400)) * np.linspace(1, 3, 32)[:, None])
    values, vectors = np.linalg.eigh(sigma)
    dealt = np.empty_like(vectors)
    for rank, column in enumerate(np.argsort(-values)):
        dealt[:, int(f"{rank:05b}"[::-1], 2)] = vectors[:, column]
    expected = dealt @ np.kron(np.eye(4), reference.sylvester(8))
    got = oscar_rotation(torch.from_numpy(sigma), block=8).double().numpy()
    # Eigenvectors are unique up to sign: compare what does not depend on it.
    signs = np.sign(
        np.sum(
            (expected @ np.kron(np.eye(4), reference.sylvester(8)))
            * (got @ np.kron(np.eye(4), reference.sylvester(8))),
            0,
        )
    )
    np.testing.assert_allclose(got, dealt * signs @ np.kron(np.eye(4), reference.sylvester(8)), atol=1e-5)
    np.testing.assert_allclose(got.T @ got, np.eye(32), atol=1e-6)


def expected_rotation(kind, generators, layer, seed=42):
    """The same rotation in float64, from the paper's formulas."""
    base, (h_k, h_v) = BASE[layer].astype(np.float32).astype(float), ENERGIES[layer]
    half = DIM // 2
    if kind == "fixed":
        return base
    if kind in ("full", "cayley"):
        omega = generators[layer] - generators[layer].T
        eye = np.eye(DIM)
        step = reference.expm_skew(omega) if kind == "full" else (eye - omega) @ np.linalg.inv(eye + omega)
        return base @ step
    if kind == "random":
        basis = random_basis(torch.from_numpy(BASE), seed)[layer].double().numpy()
    else:
        geometry = h_k + h_v if kind == "joint" else h_k - h_v
        basis = np.linalg.eigh(base.T @ geometry @ base)[1][:, ::-1]
    blocks = np.zeros((DIM, DIM))
    for i in range(2):
        a = generators[layer, i]
        blocks[i * half : (i + 1) * half, i * half : (i + 1) * half] = reference.expm_skew(a - a.T)
    return base @ basis @ blocks @ basis.T


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_agree_with_float64(kind):
    rotation = build_rotation(kind, torch.from_numpy(BASE), torch.from_numpy(ENERGIES))
    np.testing.assert_allclose(rotation().detach().numpy(), BASE, atol=1e-6)  # all start at R0
    rng = np.random.default_rng(7)
    parameters = list(rotation.parameters())
    generators = None
    for parameter in parameters:
        generators = rng.standard_normal(parameter.shape) * 0.3
        parameter.data = torch.from_numpy(generators).float()
        generators = parameter.data.double().numpy()
    got = rotation().detach().double().numpy()
    exported = rotation.export().double().numpy()
    for layer in range(LAYERS):
        expected = expected_rotation(kind, generators, layer)
        # A subspace's rotation is conjugated by signs of its eigenvectors, which the generators absorb
        # only up to the basis the eigensolver chose: compare through an equal basis.
        if kind in ("joint", "contrast"):
            basis = rotation.basis[layer].double().numpy()
            h = ENERGIES[layer, 0] + (1 if kind == "joint" else -1) * ENERGIES[layer, 1]
            rotated = BASE[layer].T @ h @ BASE[layer]
            values = np.diag(basis.T @ rotated @ basis)
            assert (np.diff(values) <= 1e-7).all()
            np.testing.assert_allclose(values, np.linalg.eigvalsh(rotated)[::-1], atol=1e-6)
            own = np.linalg.eigh(rotated)[1][:, ::-1]
            flips = np.diag(np.sign(np.sum(basis * own, 0)))
            half = DIM // 2
            blocks = np.zeros((DIM, DIM))
            for i in range(2):
                a = generators[layer, i]
                blocks[i * half : (i + 1) * half, i * half : (i + 1) * half] = reference.expm_skew(a - a.T)
            expected = BASE[layer] @ own @ flips @ blocks @ flips @ own.T
        np.testing.assert_allclose(got[layer], expected, atol=3e-6)
        np.testing.assert_allclose(exported[layer], expected, atol=3e-6)
        np.testing.assert_allclose(exported[layer].T @ exported[layer], np.eye(DIM), atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "count"), [("joint", DIM**2 // 2), ("random", DIM**2 // 2), ("full", DIM**2)]
)
def test_parameter_counts(kind, count):
    rotation = build_rotation(kind, torch.from_numpy(BASE), torch.from_numpy(ENERGIES))
    assert sum(p.numel() for p in rotation.parameters()) == LAYERS * count


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "fixed"])
def test_generator_gradients(kind):
    rotation = build_rotation(kind, torch.from_numpy(BASE), torch.from_numpy(ENERGIES)).double()
    (parameter,) = rotation.parameters()
    parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).double() * 0.1
    weight = torch.randn(LAYERS, DIM, DIM, generator=torch.Generator().manual_seed(1)).double()
    assert torch.autograd.gradcheck(lambda a: _rotate_with(rotation, a, weight), (parameter,), fast_mode=True)


def _rotate_with(rotation, generators, weight):
    return (torch.func.functional_call(rotation, {"generators": generators}, ()) * weight).sum()


def test_unknown_kind_suggests():
    with pytest.raises(RolaqError, match="Unknown rotation 'jont'. Did you mean: joint"):
        build_rotation("jont", torch.from_numpy(BASE), torch.from_numpy(ENERGIES))


def mla_layer(heads=3, nope=4, v=5):
    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(DIM, heads * (nope + v), bias=False)
    return MLALayer("layer", module, 0, DIM, 2, heads, nope, v)


def test_projections_are_head_interleaved():
    layer = mla_layer()
    weight = layer.module.kv_b_proj.weight.detach().double().numpy()
    w_k, w_v = projections(layer)
    rows = [weight[h * 9 : h * 9 + 4] for h in range(3)], [weight[h * 9 + 4 : h * 9 + 9] for h in range(3)]
    np.testing.assert_array_equal(w_k.numpy(), np.concatenate(rows[0]))
    np.testing.assert_array_equal(w_v.numpy(), np.concatenate(rows[1]))
    h_k, h_v = energy(w_k, w_v)
    for h, w in ((h_k, w_k), (h_v, w_v)):
        gram = w.numpy().T @ w.numpy()
        np.testing.assert_allclose(h.numpy(), gram / np.trace(gram), atol=1e-12)


def test_cumulative_energy():
    h_k, h_v = (torch.from_numpy(h) for h in ENERGIES[0])
    vectors = np.linalg.eigh(ENERGIES[0].sum(0))[1][:, ::-1]
    f_k, f_v = cumulative_energy(h_k, h_v)
    for got, h in ((f_k, h_k), (f_v, h_v)):
        expected = np.cumsum([u @ h.numpy() @ u for u in vectors.T])
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-10)
        assert got[-1].item() == pytest.approx(1)


def test_cayley_is_about_twice_the_exponential_backwards():
    """(I - Ω)(I + Ω)^{-1} = e^{-2Ω} up to the third order in Ω."""
    rotation = build_rotation(
        "cayley", torch.eye(DIM).expand(1, -1, -1), torch.from_numpy(ENERGIES[:1])
    ).double()
    a = 1e-3 * np.random.default_rng(0).standard_normal((1, DIM, DIM))
    rotation.generators.data = torch.from_numpy(a)
    expected = reference.expm_skew(-2 * (a[0] - a[0].T))
    np.testing.assert_allclose(rotation()[0].detach().numpy(), expected, atol=1e-6)
