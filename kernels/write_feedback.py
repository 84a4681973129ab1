"""Write new latents with error feedback: one launch rotates, one rounds block by block, packs and stores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.kernels.write import _rotate, _statistics, split_rotation
from rolaq.quant.feedback import ERROR_LEVELS, WEIGHT_LEVELS, Feedback
from rolaq.quant.spec import QuantizerSpec

GROUP = 128
MANY = 2048  # tokens from which programs take more of them each
ROTATE, CHAIN = ((16, 4), (128, 8)), ((16, 4), (32, 8))  # tokens of a program and its warps: few, many
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds half to even


class FeedbackWriter(NamedTuple):
    """A layer's write, prepared once by `prepare`.

    rotation `[3, d, d]` BF16 parts of P; shift `[d]` fp32, mean P; weight `[d, d]` int8, the feedback
    weights transposed; unit `[d]` fp32.
    """

    rotation: Tensor
    shift: Tensor
    weight: Tensor
    unit: Tensor
    threshold: float
    gain: float
    spec: QuantizerSpec


def prepare(
    rotation: Tensor,
    shift: Tensor,
    feedback: Feedback,
    *,
    threshold: float,
    gain: float,
    spec: QuantizerSpec,
) -> FeedbackWriter:
    """From P `[d, d]` and shift `[d]` fp32 and one layer's feedback; see `quant.methods.shaped`.

    Raises `RolaqError` for a group other than 128, or a width other than 256 and 512.
    """
    d = rotation.shape[-1]
    if d not in (256, 512) or spec.group_size != GROUP or spec.feedback_block not in (32, 64, 128):
        raise RolaqError(
            f"no feedback write kernel for latent {d}, group {spec.group_size}, feedback_block "
            f"{spec.feedback_block}; d is 256 or 512, group 128, feedback_block 32, 64 or 128"
        )
    parts, weight = split_rotation(rotation), feedback.weight.mT.contiguous()
    return FeedbackWriter(parts, shift.float(), weight, feedback.unit, threshold, gain, spec)


@triton.jit
def _sums(errors, weight, g, h, D: tl.constexpr):
    """Integer sums `[M, 128]` that group g's errors `[M, 128]` int8 put on group h's coordinates."""
    i = tl.arange(0, 128)
    at = weight + (h * 128 + i)[None, :] * D + (g * 128 + i)[:, None]
    return tl.dot(errors, tl.load(at), out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _group(
    z, carried, weight, unit, g, threshold, factor, per_step, eps,
    D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Codes `[M, 128]` int32, errors `[M, 128]` int8, scale and offset `[M]` of one group.

    Every pass works on the whole group and settles one more block: errors of blocks not settled yet
    are left out of the sums, and what is settled comes out the same again.
    """
    mean, sigma = _statistics(z, eps)
    scale, one = factor * sigma, tl.full([M], 1.0, tl.float32)
    inverse = tl.div_rn(one, sigma)
    x = tl.div_rn(z - mean[:, None], tl.broadcast_to(sigma[:, None], [M, 128]))
    i = tl.arange(0, 128)
    units = tl.load(unit + g * 128 + i)[None, :]
    at = weight + (g * 128 + i)[None, :] * D + (g * 128 + i)[:, None]
    own = tl.load(at)
    sums = tl.zeros([M, 128], tl.float32)
    code = tl.zeros([M, 128], tl.int32)
    errors = tl.zeros([M, 128], tl.int8)
    for done in tl.static_range(0, 128, BLOCK):
        target = x - units * (carried + scale[:, None] * sums) * inverse[:, None]
        code = (
            (target >= -threshold).to(tl.int32)
            + (target >= 0.0).to(tl.int32)
            + (target >= threshold).to(tl.int32)
        )
        wide = (LEVELS * code.to(tl.float32) - 1.5 * LEVELS) - target * per_step
        wide = tl.minimum(tl.maximum(wide, -TOP), TOP)
        wide = (wide + TO_INTEGER) - TO_INTEGER
        errors = tl.where(i[None, :] < done + BLOCK, wide, 0.0).to(tl.int8)
        if done + BLOCK < 128:
            sums = tl.dot(errors, own, out_dtype=tl.int32).to(tl.float32)
    return code, errors, scale, mean - 1.5 * scale


@triton.jit
def _rotate_kernel(
    latents, rotation, shift, out, n,
    D: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`c P - shift` of M tokens and one group, fp32, to scratch."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok, g = row < n, tl.program_id(1)
    col = g * 128 + tl.arange(0, 128)
    z = _rotate(latents, rotation, row, ok, g, D, M, K, TYPE) - tl.load(shift + col)[None, :]
    tl.store(out + row[:, None] * D + col[None, :], z, mask=ok[:, None])


@triton.jit
def _chain_kernel(
    latents, rope, weight, unit, slots, rows16, rows32, exact, exact_index, n,
    threshold, factor, per_step, eps,
    D: tl.constexpr, DR: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, TOP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """M rotated tokens, group after group; up to four groups, whose errors stay in registers."""
    W: tl.constexpr = D // 8
    G: tl.constexpr = D // 128
    P: tl.constexpr = 128 // W
    ROW32: tl.constexpr = (D // 4 + 2 * DR + 8 * G) // 4
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok = row < n
    slot = tl.load(slots + row, mask=ok, other=0).to(tl.int64)
    i = tl.arange(0, DR)
    key = tl.load(rope + row[:, None] * DR + i[None, :], mask=ok[:, None], other=0)
    tl.store(rows16 + (slot * (2 * ROW32) + W)[:, None] + i[None, :], key, mask=ok[:, None])
    words = tl.zeros([M, W], tl.int32)
    e0 = tl.zeros([M, 128], tl.int8)
    e1, e2, s0 = e0, e0, tl.zeros([M], tl.float32)
    s1, s2 = s0, s0
    for g in tl.static_range(G):
        col = g * 128 + tl.arange(0, 128)
        z = tl.load(latents + row[:, None] * D + col[None, :], mask=ok[:, None], other=0.0)
        carried = tl.zeros([M, 128], tl.float32)
        if g > 0:
            carried = carried + s0[:, None] * _sums(e0, weight, 0, g, D)
        if g > 1:
            carried = carried + s1[:, None] * _sums(e1, weight, 1, g, D)
        if g > 2:
            carried = carried + s2[:, None] * _sums(e2, weight, 2, g, D)
        code, errors, scale, offset = _group(
            z, carried, weight, unit, g, threshold, factor, per_step, eps, D, M, BLOCK, LEVELS, TOP
        )
        if g == 0:
            e0, s0 = errors, scale
        if g == 1:
            e1, s1 = errors, scale
        if g == 2:
            e2, s2 = errors, scale
        at = rows32 + slot * ROW32 + (W + DR) // 2 + 2 * g
        tl.store(at, scale, mask=ok)
        tl.store(at + 1, offset, mask=ok)
        if EXACT:
            where = tl.load(exact_index + row, mask=ok, other=-1).to(tl.int64)
            at = exact + where[:, None] * D + col[None, :]
            tl.store(at, z.to(tl.bfloat16), mask=(ok & (where >= 0))[:, None])
        moved = 2 * (P * g + tl.arange(0, P))
        words |= tl.sum(tl.reshape(code, [M, P, W]) << moved[None, :, None], 1)
    at = rows16 + (slot * (2 * ROW32))[:, None] + tl.arange(0, W)[None, :]
    tl.store(at, words.to(tl.int16), mask=ok[:, None])


def write_with_feedback(
    latents: Tensor,
    rope: Tensor,
    writer: FeedbackWriter,
    slots: Tensor,
    rows: Tensor,
    *,
    rotated: bool = False,
    exact_latents: Tensor | None = None,
    exact_index: Tensor | None = None,
) -> None:
    """As `kernels.write.write`, with `writer`'s feedback; rows are read by the same kernels.

    latents `[n, d]` are BF16 and as the model makes them, or, with `rotated`, fp32 in the written basis
    (`c P - shift`), contiguous. Codes, scale and offset equal `quant.feedback.encode_with_feedback`'s bit for bit on
    the same rotated fp32 latents.
    """
    n, d = latents.shape
    d_r, spec = rope.shape[-1], writer.spec
    if d_r not in (32, 64):
        raise RolaqError(f"no feedback write kernel for RoPE {d_r}; it is 32 or 64")
    if n == 0:
        return
    many = int(n >= MANY)
    if not rotated:
        latents = rotate_centred(latents, writer)
    factor = torch.tensor(2 * spec.a_in, dtype=torch.float32) * torch.tensor(writer.gain, dtype=torch.float32)
    exact = exact_latents is not None
    block, warps = CHAIN[many]
    _chain_kernel[(triton.cdiv(n, block),)](
        latents, rope.contiguous().view(torch.int16), writer.weight, writer.unit, slots,
        rows.view(torch.int16), rows.view(torch.float32), exact_latents if exact else latents,
        exact_index if exact else slots, n, writer.threshold, factor.item(), (ERROR_LEVELS / factor).item(),
        spec.sigma_eps, D=d, DR=d_r, M=block, BLOCK=spec.feedback_block, LEVELS=float(ERROR_LEVELS),
        TOP=float(WEIGHT_LEVELS), EXACT=exact, num_warps=warps, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


def rotate_centred(latents: Tensor, writer: FeedbackWriter) -> Tensor:
    """`c P - shift` `[n, d]` fp32 of latents `[n, d]` BF16: the first launch of `write_with_feedback`."""
    n, d = latents.shape
    block, warps = ROTATE[int(n >= MANY)]
    out = torch.empty(n, d, dtype=torch.float32, device=latents.device)
    _rotate_kernel[triton.cdiv(n, block), d // GROUP](
        latents.contiguous(), writer.rotation, writer.shift, out, n, D=d, M=block, K=64,
        TYPE=tl.bfloat16 if latents.is_cuda else tl.float32, num_warps=warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out
