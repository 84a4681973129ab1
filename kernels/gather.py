"""Dequantize packed rows into BF16 latents, for prefill over a cached prefix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.spec import QuantizerSpec

DEFAULT = QuantizerSpec()


@triton.jit
def _parameters(rows32, slot, ok, g, ROW32: tl.constexpr, START: tl.constexpr):
    at = rows32 + slot * ROW32 + START + 2 * g
    return tl.load(at, mask=ok, other=0.0)[:, None], tl.load(at + 1, mask=ok, other=0.0)[:, None]


@triton.jit
def _gather_kernel(
    rows16, rows32, slots, out, rope_out, n,
    D: tl.constexpr, DR: tl.constexpr, M: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """M tokens: codes times scale plus offset, one bit plane (W neighbouring coordinates) at a time."""
    W: tl.constexpr = D // 8
    P: tl.constexpr = 128 // W
    ROW32: tl.constexpr = (D // 4 + 2 * DR + D // 16) // 4
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok = row < n
    slot = tl.load(slots + row, mask=ok, other=0).to(tl.int64)
    w = tl.arange(0, W)
    at = rows16 + (slot * (2 * ROW32))[:, None]
    words = tl.load(at + w[None, :], mask=ok[:, None], other=0).to(tl.int32)
    place = out + row.to(tl.int64)[:, None] * D + w[None, :]
    for g in tl.static_range(D // 128):
        scale, offset = _parameters(rows32, slot, ok, g, ROW32, (W + DR) // 2)
        for p in tl.static_range(P):
            code = (words >> (2 * (g * P + p))) & 3
            z = code.to(tl.float32) * scale + offset
            tl.store(place + (g * P + p) * W, z.to(tl.bfloat16), mask=ok[:, None])
    if ROPE:
        i = tl.arange(0, DR)
        key = tl.load(at + W + i[None, :], mask=ok[:, None], other=0)
        tl.store(rope_out + row.to(tl.int64)[:, None] * DR + i[None, :], key, mask=ok[:, None])


@triton.jit
def _unrotate_kernel(
    rows16, rows32, slots, rotation, out, n,
    D: tl.constexpr, DR: tl.constexpr, M: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """M tokens and 128 coordinates of the original basis: `z_hat R^T`, a bit plane of z_hat a step."""
    W: tl.constexpr = D // 8
    P: tl.constexpr = 128 // W
    ROW32: tl.constexpr = (D // 4 + 2 * DR + D // 16) // 4
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok = row < n
    slot = tl.load(slots + row, mask=ok, other=0).to(tl.int64)
    w = tl.arange(0, W)
    words = tl.load(rows16 + (slot * (2 * ROW32))[:, None] + w[None, :], mask=ok[:, None], other=0).to(
        tl.int32
    )
    col = tl.program_id(1) * 128 + tl.arange(0, 128)
    acc = tl.zeros([M, 128], tl.float32)
    for j in range(8):
        scale, offset = _parameters(rows32, slot, ok, j // P, ROW32, (W + DR) // 2)
        z = ((words >> (2 * j)) & 3).to(tl.float32) * scale + offset
        back = tl.load(rotation + col[None, :] * D + (j * W + w)[:, None]).to(TYPE)
        acc = tl.dot(z.to(tl.bfloat16).to(TYPE), back, acc)
    tl.store(out + row.to(tl.int64)[:, None] * D + col[None, :], acc.to(tl.bfloat16), mask=ok[:, None])


def gather(
    rows: Tensor,
    slots: Tensor,
    d: int,
    d_r: int,
    *,
    rotation: Tensor | None = None,
    out: Tensor | None = None,
    rope_out: Tensor | None = None,
    spec: QuantizerSpec = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Latents `[n, d]` and RoPE keys `[n, d_r]`, both BF16, of `rows[slots]`; slots `[n]` int32 or int64.

    In the rotated basis, or with `rotation = R [d, d]` BF16 in the original one (`z_hat R^T`; z_hat and R
    are rounded to BF16 first). Folding R into the projection that follows is cheaper where it can be done.
    """
    if d not in (256, 512) or d_r not in (32, 64) or spec.group_size != 128:
        raise RolaqError(
            f"no gather kernel for latent {d}, RoPE {d_r}, group {spec.group_size}; d is 256 or 512, d_r 32 or 64, group 128"
        )
    n = slots.shape[0]
    out = torch.empty(n, d, dtype=torch.bfloat16, device=rows.device) if out is None else out
    rope_out = torch.empty(n, d_r, dtype=torch.bfloat16, device=rows.device) if rope_out is None else rope_out
    if n == 0:
        return out, rope_out
    rows16, rows32 = rows.view(torch.int16), rows.view(torch.float32)
    if rotation is None:
        grid = (triton.cdiv(n, 16),)
        _gather_kernel[grid](
            rows16, rows32, slots, out, rope_out.view(torch.int16), n, D=d, DR=d_r, M=16, ROPE=True
        )
        return out, rope_out
    part = spec.row(d, d_r).rope
    rope_out.view(torch.uint8).copy_(rows[slots.long(), part.offset : part.offset + part.size])
    kind = tl.bfloat16 if rows.is_cuda else tl.float32
    _unrotate_kernel[(triton.cdiv(n, 64), d // 128)](
        rows16, rows32, slots, rotation.contiguous(), out, n, D=d, DR=d_r, M=64, TYPE=kind, num_warps=4
    )
    return out, rope_out
