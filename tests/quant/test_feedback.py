"""The chain of error feedback: bit for bit against integers in NumPy, its gain, its gradients."""

import numpy as np
import pytest
import reference
import torch
from test_shaping import sensitivity

from rolaq.quant import response
from rolaq.quant.feedback import (
    Feedback,
    encode_with_feedback,
    fake_quantize_with_feedback,
    quantize_feedback,
)
from rolaq.quant.quantizer import decode, encode, fake_quantize, group_statistics
from rolaq.quant.shaping import block_factor, feedback_matrix, regularise
from rolaq.quant.spec import QuantizerSpec

T0 = torch.tensor(QuantizerSpec().threshold_init)
GAIN = response.gain(T0)


def spec(block, group=128):
    return QuantizerSpec(feedback_block=block, group_size=group)


def latents(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * 1.7 + 0.1).float()


def chain_in_integers(z, feedback, block, group, threshold, gain):
    """Codes of one token: int64 sums, one fp32 operation at a time, as the README lists them."""
    f32, weight, unit = np.float32, feedback.weight.numpy().astype(np.int64), feedback.unit.numpy()
    x, _, sigma = (t.numpy().reshape(-1) for t in group_statistics(torch.from_numpy(z), spec(block, group)))
    factor = f32(2 * QuantizerSpec().a_in) * f32(gain)
    scale, per_step, inverse = factor * sigma, f32(64) / factor, f32(1) / sigma
    codes, errors = np.zeros(len(z), np.int64), np.zeros(len(z), np.int64)
    for k in range(len(z)):
        start, taken = k // block * block, f32(0)
        for g in range(k // group + 1):
            own = slice(g * group, min((g + 1) * group, start))
            taken = taken + scale[g] * f32(errors[own] @ weight[own, k])
        t = x[k] - unit[k] * taken * inverse[k // group]
        codes[k] = int(t >= -f32(threshold)) + int(t >= 0) + int(t >= f32(threshold))
        error = f32(64 * codes[k] - 96) - t * per_step
        errors[k] = np.clip(np.rint(error), -127, 127)
    return codes


@pytest.mark.parametrize(("d", "block", "group"), [(256, 32, 128), (128, 8, 64), (64, 1, 32), (64, 64, 64)])
def test_codes_equal_an_integer_chain(d, block, group):
    feedback = quantize_feedback(feedback_matrix(regularise(sensitivity(d), 0.03), block))
    z = latents(5, d)
    z[3, : d // 2] = 0.25  # a constant group
    z[4] *= 1e4
    found = encode_with_feedback(z, T0, GAIN, feedback, spec(block, group))
    for token in range(len(z)):
        expected = chain_in_integers(z[token].numpy(), feedback, block, group, T0.item(), GAIN.item())
        assert found.codes[token].tolist() == expected.tolist()


def test_statistics_are_those_of_nearest_rounding():
    z, feedback = latents(7, 256), quantize_feedback(feedback_matrix(regularise(sensitivity(256), 0.1), 32))
    nearest, found = encode(z, T0, GAIN), encode_with_feedback(z, T0, GAIN, feedback, spec(32))
    assert torch.equal(nearest.scale, found.scale) and torch.equal(nearest.offset, found.offset)
    assert not torch.equal(nearest.codes, found.codes)
    none = Feedback(torch.zeros_like(feedback.weight), torch.zeros_like(feedback.unit))
    assert torch.equal(encode_with_feedback(z, T0, GAIN, none, spec(32)).codes, nearest.codes)


def test_tokens_do_not_depend_on_each_other_or_on_their_number():
    z, feedback = latents(70, 256), quantize_feedback(feedback_matrix(regularise(sensitivity(256), 0.1), 32))
    whole = encode_with_feedback(z, T0, GAIN, feedback, spec(32)).codes
    alone = torch.cat([encode_with_feedback(row[None], T0, GAIN, feedback, spec(32)).codes for row in z])
    assert torch.equal(whole, alone)


def test_damage_falls_as_far_as_the_factor_says():
    """Against round-to-nearest on Gaussian latents; a float64 chain with exact weights does as well."""
    m = regularise(sensitivity(256, spread=2), 0.1)
    z = latents(400, 256, seed=1)
    feedback = quantize_feedback(feedback_matrix(m, 1))

    def damage(codes):
        error = (decode(codes) - z).double()
        return float(((error @ m) * error).sum())

    nearest, shaped = encode(z, T0, GAIN), encode_with_feedback(z, T0, GAIN, feedback, spec(1))
    upper, inner = block_factor(m, 1)
    expected = float(inner.diagonal().sum() / m.diagonal().sum())
    assert expected < 0.65
    # feedback widens what is rounded, so that more of it lies beyond the outer levels
    assert expected < damage(shaped) / damage(nearest) < 1.35 * expected
    assert damage(shaped) == pytest.approx(_float_chain_damage(z, upper, m), rel=0.02)


def _float_chain_damage(z, upper, m):
    z, upper = z.double().numpy(), upper.numpy()
    _, mean, sigma = reference.standardise(z)
    mean, sigma = (np.repeat(v[..., 0], 128, axis=-1) for v in (mean, sigma))
    error = np.zeros_like(z)
    for k in range(z.shape[1]):
        target = (z[:, k] - error @ upper[:, k] - mean[:, k]) / sigma[:, k]
        outer = np.where(np.abs(target) >= T0.item(), reference.A_OUT, reference.A_IN)
        restored = mean[:, k] + sigma[:, k] * GAIN.item() * np.sign(target) * outer
        error[:, k] = restored - z[:, k]
    return float(((error @ m.numpy()) * error).sum())


def test_weights_are_rounded_by_column():
    v = feedback_matrix(regularise(sensitivity(64), 0.05), 16)
    feedback = quantize_feedback(v)
    assert feedback.weight.dtype == torch.int8 and feedback.unit[:16].abs().max() == 0
    assert (feedback.weight[:, 16:].abs().amax(0) == 127).all()
    error = (feedback.matrix().double() - v).abs()
    assert (error <= v.abs().amax(0) / 127 * 0.5001 + 1e-12).all()


def test_forward_and_identity_gradient():
    z = latents(6, 256).requires_grad_()
    feedback = quantize_feedback(feedback_matrix(regularise(sensitivity(256), 0.1), 32))
    restored = fake_quantize_with_feedback(z, T0, GAIN, feedback, spec(32))
    assert torch.equal(restored, decode(encode_with_feedback(z.detach(), T0, GAIN, feedback, spec(32))))
    weights = latents(6, 256, seed=9)
    (restored * weights).sum().backward()
    assert torch.equal(z.grad, weights)


def test_threshold_gradient_without_feedback_is_nearest_roundings():
    z, weights = latents(6, 256), latents(6, 256, seed=9)
    none = Feedback(torch.zeros(256, 256, dtype=torch.int8), torch.zeros(256))

    def gradient(quantize):
        threshold = T0.clone().requires_grad_()
        (quantize(threshold, response.gain(threshold)) * weights).sum().backward()
        return threshold.grad

    found = gradient(lambda t, g: fake_quantize_with_feedback(z, t, g, none, spec(32)))
    torch.testing.assert_close(found, gradient(lambda t, g: fake_quantize(z, t, g)))


def test_gain_gradient_runs_through_the_chain():
    """Against autograd through a chain written out with codes held fixed: z_hat = t + f, f linear in g."""
    z, weights = latents(3, 64).double(), latents(3, 64, seed=9).double()
    feedback = quantize_feedback(feedback_matrix(regularise(sensitivity(64), 0.1), 16))
    s = spec(16, 64)
    gain = GAIN.clone().requires_grad_()
    (fake_quantize_with_feedback(z.float(), T0, gain, feedback, s) * weights.float()).sum().backward()
    codes = encode_with_feedback(z.float(), T0, GAIN, feedback, s).codes
    _, _, sigma = reference.standardise(z.numpy(), 64)
    levels = torch.from_numpy(sigma[..., 0]) * 2 * s.a_in * (codes.double() - 1.5)
    free, own = GAIN.double().clone().requires_grad_(), []
    for k in range(64):  # each rounding's own error moves with its level, its target with earlier errors
        own.append(levels[:, k] * (free - GAIN.double()))
    own = torch.stack(own, 1)
    ((own - own @ feedback.matrix().double()) * weights).sum().backward()
    assert gain.grad.item() == pytest.approx(free.grad.item(), rel=1e-4)


@pytest.mark.parametrize("block", [3, 48, 256])
def test_blocks_stay_inside_groups(block):
    with pytest.raises(ValueError, match=f"feedback_block {block} must divide group_size 128"):
        spec(block)


def test_a_spec_without_feedback_reads_as_before():
    assert "feedback_block" not in QuantizerSpec().model_dump_json()
    assert '"feedback_block":32' in spec(32).model_dump_json()
    assert QuantizerSpec.model_validate_json(spec(32).model_dump_json()) == spec(32)
