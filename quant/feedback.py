"""Error-feedback rounding: each block of coordinates takes up the errors made before it.

The arithmetic is the same bit for bit on every device and in every order of sums: errors are int8 in
64ths of a step, feedback weights int8, their sums integers below 2^24. Shapes as in `quantizer`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolaq.quant.quantizer import Codes, decode, group_statistics, parameter_gradients
from rolaq.quant.spec import QuantizerSpec

ERROR_LEVELS = 64  # of one step; errors saturate at 127, which is two steps
WEIGHT_LEVELS = 127


class Feedback(NamedTuple):
    """Quantized feedback matrices: `V[j, k] = 64 unit[k] weight[j, k]`.

    weight `[..., d, d]` int8, strictly block upper triangular; unit `[..., d]` fp32.
    """

    weight: Tensor
    unit: Tensor

    def matrix(self) -> Tensor:
        """V `[..., d, d]` fp32."""
        return self.weight.float() * (ERROR_LEVELS * self.unit[..., None, :])


def quantize_feedback(matrix: Tensor) -> Feedback:
    """int8 weights with one unit for each column of `V [..., d, d]`, in fp64, rounded half to even."""
    matrix = matrix.double()
    largest = matrix.abs().amax(-2) / WEIGHT_LEVELS
    weight = (matrix / torch.where(largest > 0, largest, 1.0)[..., None, :]).round()
    return Feedback(weight.to(torch.int8), (largest / ERROR_LEVELS).float())


class Chain(NamedTuple):
    """What the chain leaves behind: standardised targets x `[..., d]` fp32 as rounded, codes as fp32, sigma, mean."""

    targets: Tensor
    codes: Tensor
    scale: Tensor
    mean: Tensor
    sigma: Tensor


def encode_with_feedback(
    z: Tensor, threshold: Tensor, gain: Tensor, feedback: Feedback, spec: QuantizerSpec
) -> Codes:
    """Quantize rotated latents `z [..., d]` block by block; scale and offset are those of `quantizer.encode`.

    Statistics come from z before feedback. Blocks are `spec.feedback_block` coordinates.
    """
    chain = run_chain(z, threshold, gain, feedback, spec)
    offset = chain.mean - 1.5 * chain.scale
    dtype = getattr(torch, spec.stats_dtype)
    stored = (value.to(dtype).float() for value in (chain.scale, offset))
    return Codes(chain.codes.to(torch.uint8), *stored)


def run_chain(z: Tensor, threshold: Tensor, gain: Tensor, feedback: Feedback, spec: QuantizerSpec) -> Chain:
    """The chain over blocks; see the README for the arithmetic, operation by operation."""
    x, mean, sigma = group_statistics(z, spec)
    mean, sigma = mean.squeeze(-1), sigma.squeeze(-1)
    factor = torch.tensor(2 * spec.a_in, dtype=torch.float32, device=z.device) * gain
    scale, per_step, inverse = factor * sigma, ERROR_LEVELS / factor, 1 / sigma
    x, weight = x.flatten(-2), feedback.weight.float()
    targets, codes, carried = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(x)
    sums = torch.zeros_like(x)  # integers, of the current group's errors
    for first in range(0, x.shape[-1], spec.feedback_block):
        part = slice(first, first + spec.feedback_block)
        group = first // spec.group_size
        taken = carried[..., part] + scale[..., group, None] * sums[..., part]
        target = x[..., part] - feedback.unit[part] * taken * inverse[..., group, None]
        code = (target >= -threshold).float() + (target >= 0).float() + (target >= threshold).float()
        error = (ERROR_LEVELS * code - 1.5 * ERROR_LEVELS) - target * per_step
        error = error.round().clamp(-WEIGHT_LEVELS, WEIGHT_LEVELS)
        targets[..., part], codes[..., part] = target, code
        sums[..., part.stop :] += error @ weight[part, part.stop :]
        if part.stop % spec.group_size == 0:
            carried = carried + scale[..., group, None] * sums
            sums = torch.zeros_like(sums)
    return Chain(targets, codes, scale, mean, sigma)


def fake_quantize_with_feedback(
    z: Tensor, threshold: Tensor, gain: Tensor, feedback: Feedback, spec: QuantizerSpec, width: float = 0.1
) -> Tensor:
    """Differentiable `decode(encode_with_feedback(z))`, fp32 `[..., d]`.

    Backward: identity to z (each rounding has unit mean slope). T and g act on each rounding's own
    error f, which the chain turns into `f (I - V)`; the feedback matrix itself takes no gradient.
    """
    return _Shaped.apply(z, threshold, gain, feedback.weight, feedback.unit, spec, width)


class _Shaped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        threshold: Tensor,
        gain: Tensor,
        weight: Tensor,
        unit: Tensor,
        spec: QuantizerSpec,
        width: float,
    ) -> Tensor:
        feedback = Feedback(weight, unit)
        chain = run_chain(z, threshold, gain, feedback, spec)
        ctx.save_for_backward(chain.targets, chain.sigma, threshold, gain, weight, unit)
        ctx.spec, ctx.width = spec, width
        return decode(Codes(chain.codes, chain.scale, chain.mean - 1.5 * chain.scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        targets, sigma, threshold, gain, weight, unit = ctx.saved_tensors
        grad = grads[0].float()
        own = grad - grad @ Feedback(weight, unit).matrix().mT
        own = own.unflatten(-1, (sigma.shape[-1], -1)) * sigma[..., None]
        x = targets.unflatten(-1, (sigma.shape[-1], -1))
        ranges = parameter_gradients(own, x, threshold, gain, ctx.spec, ctx.width)
        return grads[0], *ranges, None, None, None, None
