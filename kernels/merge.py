"""Merge the partial results of a sequence's work items by their log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from rolaq.kernels.plan import Plan

COLUMNS = 16


@triton.jit
def _merge_column(
    part, lse, out, lse_out, start, stop, at, col, blocks, write_lse,
    D: tl.constexpr, N: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Coordinates `at` of one query column, ITEMS partial results at a time."""
    i = tl.arange(0, ITEMS)
    top = float("-inf")
    weight = 0.0
    acc = at.to(tl.float32) * 0.0
    for begin in range(start, stop, ITEMS):
        ok = begin + i < stop
        row = (begin + i) * blocks * N + col
        x = tl.load(lse + row, mask=ok, other=float("-inf"))
        y = tl.load(part + (row.to(tl.int64) * D)[:, None] + at[None, :], mask=ok[:, None], other=0.0)
        new = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2(x - base)
        keep = tl.exp2(top - base)
        weight = weight * keep + tl.sum(w, 0)
        acc = acc * keep + tl.sum(w[:, None] * y, 0)
        top = new
    acc = acc / tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + at, acc.to(out.dtype.element_ty))
    log = tl.where(weight > 0.0, (top + tl.log2(weight)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_out, log, mask=write_lse)


@triton.jit
def _merge_kernel(
    part, lse, first, out, lse_out, out_row, out_col, blocks,
    D: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One sequence and query column. Where few results are to be merged, the first program does it
    alone; where they are many, each program takes CHUNK coordinates. With EARLY the programs start while
    the partial results are still being made, and wait here for the last of them."""
    seq = tl.program_id(0)
    col = tl.program_id(1)
    chunk = tl.program_id(2)
    start = tl.load(first + seq)
    stop = tl.load(first + seq + 1)
    out += seq.to(tl.int64) * out_row + col * out_col
    lse_out += seq * tl.num_programs(1) + col
    many = stop - start > 2 * FEW
    if many | (chunk == 0):
        if EARLY:
            gdc_wait()
        if many:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            _merge_column(part, lse, out, lse_out, start, stop, at, col, blocks, chunk == 0, D, N, MANY)
        else:
            at = tl.arange(0, D)
            _merge_column(part, lse, out, lse_out, start, stop, at, col, blocks, True, D, N, FEW)


def merge(part: Tensor, lse: Tensor, plan: Plan, out: Tensor, lse_out: Tensor) -> None:
    """`part [items, blocks, 16, d]` and base-2 `lse [items, blocks, 16]`, both fp32 → `out [B, T, H, d]`
    and natural `lse_out [B, T, H]`; a sequence without items gets zeros and minus infinity."""
    batch, queries, heads, d = out.shape
    chunk = 64
    early = part.is_cuda and torch.cuda.get_device_capability(part.device)[0] >= 9
    _merge_kernel[(batch, queries * heads, d // chunk)](
        part, lse, plan.first, out, lse_out, out.stride(0), out.stride(2), part.shape[1],
        D=d, N=COLUMNS, CHUNK=chunk, FEW=4, MANY=64, EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
