"""Rotate, quantize, pack and store new latents in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.spec import QuantizerSpec

DEFAULT = QuantizerSpec()
SPLIT_BELOW = 3072  # tokens: below, one program a group, so that few tokens still use many programs


@triton.jit
def _statistics(z, eps):
    """Mean and sigma of each row, `[M]`: sums in fp64, so that their order does not show in fp32."""
    mean = (tl.sum(z.to(tl.float64), 1) / z.shape[1]).to(tl.float32)
    wide = (z - mean[:, None]).to(tl.float64)
    variance = (tl.sum(wide * wide, 1) / z.shape[1]).to(tl.float32)
    return mean, tl.sqrt_rn(variance + eps)


@triton.jit
def _rotate(
    latents, rotation, row, ok, g, D: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TYPE: tl.constexpr
):
    """Group g of `latents @ R` in fp32. R comes as three BF16 parts that add up to its fp32 values."""
    acc = tl.zeros([M, 128], tl.float32)
    k = tl.arange(0, K)
    col = g * 128 + tl.arange(0, 128)
    for start in range(0, D, K):
        c = tl.load(latents + row[:, None] * D + (start + k)[None, :], mask=ok[:, None], other=0.0).to(TYPE)
        at = rotation + (start + k)[:, None] * D + col[None, :]
        acc = tl.dot(c, tl.load(at + 2 * D * D).to(TYPE), acc)
        acc = tl.dot(c, tl.load(at + D * D).to(TYPE), acc)
        acc = tl.dot(c, tl.load(at).to(TYPE), acc)
    return acc


@triton.jit
def _write_group(
    z, rows32, exact, slot, where, ok, g, threshold, factor, eps,
    D: tl.constexpr, DR: tl.constexpr, ROW32: tl.constexpr, M: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Store group g's parameters and exact latents; return its bits in each word, `[M, D / 8]`."""
    W: tl.constexpr = D // 8
    P: tl.constexpr = 128 // W
    mean, sigma = _statistics(z, eps)
    x = tl.div_rn(z - mean[:, None], tl.broadcast_to(sigma[:, None], [M, 128]))
    code = (x >= -threshold).to(tl.int32) + (x >= 0.0).to(tl.int32) + (x >= threshold).to(tl.int32)
    scale = factor * sigma
    offset = mean - 1.5 * scale
    at = rows32 + slot * ROW32 + (W + DR) // 2 + 2 * g
    tl.store(at, scale, mask=ok)
    tl.store(at + 1, offset, mask=ok)
    if EXACT:
        at = exact + where[:, None] * D + (g * 128 + tl.arange(0, 128))[None, :]
        tl.store(at, z.to(tl.bfloat16), mask=(ok & (where >= 0))[:, None])
    shift = 2 * (P * g + tl.arange(0, P))
    return tl.sum(tl.reshape(code, [M, P, W]) << shift[None, :, None], 1)


@triton.jit
def _write_kernel(
    latents, rope, rotation, slots, rows16, rows32, exact, exact_index, n, threshold, factor, eps,
    D: tl.constexpr, DR: tl.constexpr, M: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
    ROTATE: tl.constexpr, EXACT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """M tokens, all groups (or with SPLIT one group, program 1's) of each."""
    W: tl.constexpr = D // 8
    G: tl.constexpr = D // 128
    P: tl.constexpr = 128 // W
    ROW32: tl.constexpr = (D // 4 + 2 * DR + 8 * G) // 4
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok = row < n
    slot = tl.load(slots + row, mask=ok, other=0).to(tl.int64)
    where = slot * 0 - 1
    if EXACT:
        where = tl.load(exact_index + row, mask=ok, other=-1).to(tl.int64)
    first = tl.program_id(1)
    if first == 0:
        i = tl.arange(0, DR)
        key = tl.load(rope + row[:, None] * DR + i[None, :], mask=ok[:, None], other=0)
        tl.store(rows16 + (slot * (2 * ROW32) + W)[:, None] + i[None, :], key, mask=ok[:, None])
    words = tl.zeros([M, W], tl.int32)
    for g in range(first, first + 1 if SPLIT else G):
        if ROTATE:
            z = _rotate(latents, rotation, row, ok, g, D, M, K, TYPE)
        else:
            at = latents + row[:, None] * D + (g * 128 + tl.arange(0, 128))[None, :]
            z = tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)
        words |= _write_group(
            z, rows32, exact, slot, where, ok, g, threshold, factor, eps, D, DR, ROW32, M, EXACT
        )
    if SPLIT:
        # Groups share words: clear and set this group's bits only, two words at a time.
        half = tl.arange(0, 2)
        pairs = tl.sum(tl.reshape(words, [M, W // 2, 2]) << (16 * half)[None, None, :], 2)
        bits = ((1 << 2 * P) - 1) << (2 * P * first)
        keep = -1 ^ (bits | (bits << 16))
        at = rows32.to(tl.pointer_type(tl.int32)) + slot[:, None] * ROW32 + tl.arange(0, W // 2)[None, :]
        tl.atomic_and(at, tl.zeros_like(pairs) + keep, mask=ok[:, None], sem="relaxed")
        tl.atomic_or(at, pairs, mask=ok[:, None], sem="relaxed")
    else:
        at = rows16 + (slot * (2 * ROW32))[:, None] + tl.arange(0, W)[None, :]
        tl.store(at, words.to(tl.int16), mask=ok[:, None])


def split_rotation(rotation: Tensor) -> Tensor:
    """`R [d, d]` fp32 → `[3, d, d]` BF16 parts that add up to it: the matrix units then work exactly."""
    parts, rest = [], rotation.float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.stack(parts)


def write(
    latents: Tensor,
    rope: Tensor,
    rotation: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    *,
    threshold: float,
    gain: float,
    exact_latents: Tensor | None = None,
    exact_index: Tensor | None = None,
    spec: QuantizerSpec = DEFAULT,
) -> None:
    """Quantize `latents [n, d]` and store them with their RoPE keys `[n, d_r]` BF16 in `rows[slots]`.

    latents are BF16 and un-rotated with `rotation = split_rotation(R)`; without a rotation they are
    taken as they are, BF16 or fp32. slots `[n]` int32 or int64, each at most once. Where
    `exact_index [n]` int32 is not negative, the rotated latent also goes to
    `exact_latents[exact_index]`, BF16. Codes, scale and offset equal `quantizer.encode`'s bit for bit
    on the same rotated fp32 latents.
    """
    n, d = latents.shape
    d_r = rope.shape[-1]
    if d not in (256, 512) or d_r not in (32, 64) or spec.group_size != 128:
        raise RolaqError(
            f"no write kernel for latent {d}, RoPE {d_r}, group {spec.group_size}; d is 256 or 512, d_r 32 or 64, group 128"
        )
    if n == 0:
        return
    factor = torch.tensor(2 * spec.a_in, dtype=torch.float32) * torch.tensor(gain, dtype=torch.float32)
    split = n < SPLIT_BELOW
    block = 16 if split else 64
    exact = exact_latents is not None
    interpreting = not latents.is_cuda
    grid = (triton.cdiv(n, block), d // 128 if split else 1)
    _write_kernel[grid](
        latents.contiguous(), rope.contiguous().view(torch.int16), latents if rotation is None else rotation,
        slots, rows.view(torch.int16), rows.view(torch.float32), exact_latents if exact else latents,
        exact_index if exact else slots, n, threshold, factor.item(), spec.sigma_eps, D=d, DR=d_r, M=block,
        K=64, SPLIT=split, ROTATE=rotation is not None, EXACT=exact,
        TYPE=tl.float32 if interpreting else tl.bfloat16, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
