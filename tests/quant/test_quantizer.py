"""Codes, reconstruction and gradients of the four-level quantizer."""

import numpy as np
import pytest
import reference
import torch

from rolaq.quant import response
from rolaq.quant.quantizer import decode, encode, fake_quantize, group_statistics, levels
from rolaq.quant.spec import QuantizerSpec

SPEC = QuantizerSpec()
SCALARS = [(reference.T0, 1.16), (0.5, 0.9008), (1.25, 1.3002), (0.87, 1.05)]


def tensor(*shape, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale).float()


@pytest.mark.parametrize("shape", [(1, 128), (3, 256), (2, 5, 512), (0, 256)])
@pytest.mark.parametrize(("threshold", "gain"), SCALARS)
def test_agrees_with_float64(shape, threshold, gain):
    z = tensor(*shape, scale=3.0) + 0.4
    codes, expected = reference.four_level(z.numpy(), threshold, gain)
    quantized = encode(z, threshold, gain)
    x, *_ = reference.standardise(z.numpy())
    # In fp32 a coordinate within a few ulps of a boundary may fall on its other side.
    clear = np.min([np.abs(x - b) for b in (-threshold, 0, threshold)], 0).reshape(z.shape) > 1e-5
    assert (quantized.codes.numpy() == codes)[clear].all()
    assert (~clear).sum() <= 0.01 * z.numel()
    np.testing.assert_allclose(decode(quantized).numpy()[clear], expected[clear], atol=2e-5)


@pytest.mark.parametrize("value", [0.0, 1.5, -3e4])
def test_constant_group_reconstructs_without_division_by_zero(value):
    z = torch.full((2, 256), value)
    restored = decode(encode(z, SPEC.threshold_init, 1.16))
    assert torch.isfinite(restored).all()
    assert torch.allclose(restored, z, atol=2e-4)


def test_ties_go_up():
    sigma = float(np.sqrt(1 + SPEC.sigma_eps))
    z = torch.tensor([1.0, -1.0] * 64)  # mean 0, deviation 1: x = ±1/sigma exactly representable
    threshold = torch.tensor(1.0) / torch.tensor(sigma, dtype=torch.float32)
    x, *_ = group_statistics(z)
    assert torch.equal(x.abs().unique(), threshold.reshape(1))
    assert encode(z, threshold, 1.0).codes.unique().tolist() == [1, 3]
    zero = torch.cat((torch.zeros(2), torch.tensor([1.0, -1.0] * 63)))
    assert encode(zero, threshold, 1.0).codes[:2].tolist() == [2, 2]


def test_levels_follow_the_codes():
    z = tensor(64, 256, seed=3)
    x, *_ = group_statistics(z)
    grid = torch.tensor([-SPEC.a_out, -SPEC.a_in, SPEC.a_in, SPEC.a_out])
    codes = encode(z, 0.9, 1.1).codes.long()
    assert torch.equal(levels(x, torch.tensor(0.9)).flatten(-2), grid[codes])


def test_half_precision_statistics_are_rounded_once():
    spec = QuantizerSpec(stats_dtype="float16")
    quantized = encode(tensor(4, 256), 0.98, 1.114, spec)
    full = encode(tensor(4, 256), 0.98, 1.114)
    assert torch.equal(quantized.codes, full.codes)
    assert torch.equal(quantized.scale, full.scale.half().float())
    assert torch.equal(quantized.offset, full.offset.half().float())


def test_forward_of_the_differentiable_form_is_the_hard_quantizer():
    z = tensor(7, 256)
    t, g = torch.tensor(0.93), torch.tensor(1.08)
    assert torch.equal(fake_quantize(z, t, g), decode(encode(z, t, g)))
    loose = fake_quantize(z, t, g, detach_stats=False)
    torch.testing.assert_close(loose, decode(encode(z, t, g)), atol=1e-6, rtol=1e-6)


def smooth(x, threshold, gain, width):
    """g a_T(x) with the outer thresholds replaced by logistic steps, float64."""
    step = 1 / (1 + np.exp(-(np.abs(x) - threshold) / width))
    return gain * np.sign(x) * (reference.A_IN + (reference.A_OUT - reference.A_IN) * step)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("width", [0.05, 0.1, 0.3])
def test_threshold_gradient_is_the_smoothed_functions(width, detach):
    z = tensor(16, 256, seed=1).double().float()
    weight = np.random.default_rng(2).standard_normal(z.shape)
    t, g = torch.tensor(0.9, requires_grad=True), torch.tensor(1.07, requires_grad=True)
    (
        fake_quantize(z, t, g, width=width, detach_stats=detach) * torch.from_numpy(weight).float()
    ).sum().backward()
    x, mean, sigma = reference.standardise(z.numpy())
    grouped = weight.reshape(x.shape)

    def loss(threshold):
        return (grouped * (mean + sigma * smooth(x, threshold, 1.07, width))).sum()

    numeric = (loss(0.9 + 1e-5) - loss(0.9 - 1e-5)) / 2e-5
    assert t.grad.item() == pytest.approx(numeric, rel=1e-4)
    _, hard = reference.four_level(z.numpy(), np.float32(0.9), 1.0)
    exact = (weight * (hard - np.broadcast_to(mean, x.shape).reshape(z.shape))).sum()
    assert g.grad.item() == pytest.approx(exact, rel=1e-4)


def test_coupled_gain_adds_its_slope():
    z, weight = tensor(8, 256), tensor(8, 256, seed=5)
    total = torch.tensor(0.9, requires_grad=True)
    (fake_quantize(z, total, response.gain(total)) * weight).sum().backward()
    t, g = torch.tensor(0.9, requires_grad=True), response.gain(torch.tensor(0.9)).requires_grad_()
    (fake_quantize(z, t, g) * weight).sum().backward()
    assert total.grad.item() == pytest.approx(
        t.grad.item() + g.grad.item() * response.gain_slope(0.9), rel=1e-5
    )


def test_straight_through_is_the_identity_with_detached_statistics():
    z = tensor(3, 256).requires_grad_()
    weight = tensor(3, 256, seed=9)
    fake_quantize(z, torch.tensor(0.9), torch.tensor(1.1)).backward(weight)
    assert torch.equal(z.grad, weight)


def test_gradient_through_statistics_is_that_of_the_straight_through_form():
    """z_hat = mean + sigma h, dh/dx = 1: finite differences of mean + sigma (h0 + x - x0) in float64."""
    z = tensor(2, 128, seed=4).requires_grad_()
    weight = tensor(2, 128, seed=6)
    fake_quantize(z, torch.tensor(0.9), torch.tensor(1.1), detach_stats=False).backward(weight)
    z0 = z.detach().double().numpy()
    x0, *_ = reference.standardise(z0)
    codes, _ = reference.four_level(z0, np.float32(0.9), 1.0)
    h0 = 1.1 * np.array([-reference.A_OUT, -reference.A_IN, reference.A_IN, reference.A_OUT])[codes]

    def loss(z64):
        x, mean, sigma = reference.standardise(z64)
        return (weight.numpy() * (mean + sigma * (h0.reshape(x.shape) + x - x0)).reshape(z64.shape)).sum()

    for index in [(0, 0), (1, 77), (0, 127)]:
        step = np.zeros_like(z0)
        step[index] = 1e-5
        numeric = (loss(z0 + step) - loss(z0 - step)) / 2e-5
        assert z.grad[index].item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)
