"""Reference four-level quantizer: codes, reconstruction, and its gradients (paper §3.2–3.3).

Shapes: a rotated latent z is `[..., d]`, split into `d / G` groups of `G` coordinates. One threshold
T and one gain g serve a whole call: both belong to a layer. All arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolaq.quant.spec import QuantizerSpec

DEFAULT = QuantizerSpec()


class Codes(NamedTuple):
    """Quantized rotated latents, `z_hat = scale * code + offset` per group.

    codes `[..., d]` uint8 in 0..3; scale and offset `[..., d / G]` fp32.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor


def group_statistics(z: Tensor, spec: QuantizerSpec = DEFAULT) -> tuple[Tensor, Tensor, Tensor]:
    """Standardise `z [..., d]` by group: (x `[..., d/G, G]`, mean and sigma `[..., d/G, 1]`), fp32.

    sigma is the population deviation with `sigma_eps` inside the root, so it is never zero; the
    division is IEEE. Sums and the root are taken in fp64 and rounded once, so that neither the order of
    a sum nor a library's square root shows: kernels reproduce mean and sigma bit for bit.
    Raises `RolaqError` when d is not a multiple of G.
    """
    groups = z.float().unflatten(-1, (spec.groups(z.shape[-1]), spec.group_size))
    centred = groups - (mean := groups.double().mean(-1, keepdim=True).float())
    variance = centred.double().square().mean(-1, keepdim=True).float()
    sigma = (variance + spec.sigma_eps).double().sqrt().float()
    return centred / sigma, mean, sigma


def encode(
    z: Tensor, threshold: Tensor | float, gain: Tensor | float, spec: QuantizerSpec = DEFAULT
) -> Codes:
    """Quantize rotated latents `z [..., d]` with threshold T and gain g (Eq. 5).

    code = [x >= -T] + [x >= 0] + [x >= T]: ties go up. scale = ((2 a_in) g) sigma and
    offset = mean - 1.5 scale, in that order, rounded to `spec.stats_dtype`.
    """
    threshold, gain = (torch.as_tensor(v, dtype=torch.float32, device=z.device) for v in (threshold, gain))
    x, mean, sigma = group_statistics(z, spec)
    codes = (x >= -threshold).to(torch.uint8) + (x >= 0).to(torch.uint8) + (x >= threshold).to(torch.uint8)
    scale = (2 * spec.a_in) * gain * sigma.squeeze(-1)
    offset = mean.squeeze(-1) - 1.5 * scale
    dtype = getattr(torch, spec.stats_dtype)
    return Codes(codes.flatten(-2), scale.to(dtype).float(), offset.to(dtype).float())


def decode(quantized: Codes) -> Tensor:
    """Reconstruct `z_hat [..., d]` fp32 from codes, scale and offset."""
    codes, scale, offset = quantized
    groups = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    return (groups * scale.unsqueeze(-1) + offset.unsqueeze(-1)).flatten(-2)


def fake_quantize(
    z: Tensor,
    threshold: Tensor,
    gain: Tensor,
    spec: QuantizerSpec = DEFAULT,
    width: float = 0.1,
    detach_stats: bool = True,
) -> Tensor:
    """Differentiable `decode(encode(z))`: `z [..., d]` fp32, scalar tensors T and g → `[..., d]` fp32.

    The forward is the hard quantizer, bit for bit. Backward: identity to z (with unit response that
    is the exact mean slope, Bussgang), a logistic density of `width` around the thresholds for bin
    assignment in T, and the exact slope in g; T also learns through g where g is computed from it.
    `detach_stats=False` lets gradients reach z through the group's mean and sigma as well.
    """
    if detach_stats:
        return _FourLevel.apply(z, threshold, gain, spec, width)
    x, mean, sigma = group_statistics(z, spec)
    levels = _UnitLevels.apply(x, threshold, gain, spec, width)
    return (mean + sigma * levels).flatten(-2)


def levels(x: Tensor, threshold: Tensor, spec: QuantizerSpec = DEFAULT) -> Tensor:
    """a_T(x) for standardised x: {-a_out, -a_in, a_in, a_out}, with `encode`'s ties."""
    # Bins are closed from below, so |x| = T is outer on the positive side and inner on the negative.
    outer = torch.where(x >= 0, x >= threshold, x < -threshold)
    return torch.where(x >= 0, 1.0, -1.0) * torch.where(outer, spec.a_out, spec.a_in)


def parameter_gradients(
    grad: Tensor, x: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec, width: float
) -> tuple[Tensor, Tensor]:
    """dL/dT at fixed g, and dL/dg, from `grad = dL/d(g a_T(x))` of x's shape."""
    closeness = torch.sigmoid((x.abs() - threshold) / width)
    density = closeness * (1 - closeness) / width
    sign = torch.where(x >= 0, 1.0, -1.0)
    d_threshold = -gain * (spec.a_out - spec.a_in) * (grad * sign * density).sum()
    d_gain = (grad * levels(x, threshold, spec)).sum()
    return d_threshold.to(threshold.dtype), d_gain.to(gain.dtype)


class _FourLevel(torch.autograd.Function):
    """`decode(encode(z))` with mean and sigma held constant in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec, width: float
    ) -> Tensor:
        ctx.save_for_backward(z, threshold, gain)
        ctx.spec, ctx.width = spec, width
        return decode(encode(z, threshold, gain, spec))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, threshold, gain = ctx.saved_tensors
        x, _, sigma = group_statistics(z, ctx.spec)
        weighted = grads[0].float().unflatten(-1, x.shape[-2:]) * sigma
        return grads[0], *parameter_gradients(weighted, x, threshold, gain, ctx.spec, ctx.width), None, None


class _UnitLevels(torch.autograd.Function):
    """`g a_T(x)` on standardised coordinates, straight-through in x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec, width: float
    ) -> Tensor:
        ctx.save_for_backward(x, threshold, gain)
        ctx.spec, ctx.width = spec, width
        return gain * levels(x, threshold, spec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, threshold, gain = ctx.saved_tensors
        return grads[0], *parameter_gradients(grads[0], x, threshold, gain, ctx.spec, ctx.width), None, None
