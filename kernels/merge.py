"""Merge the partial results of a sequence's work items by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rolaq.kernels.plan import Plan

COLUMNS = 16
FILL = 512  # programs


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
):  # fmt: skip
    """CHUNK coordinates of one sequence and query column, FEW or MANY partial results at a time."""
    seq = tl.program_id(0)
    col = tl.program_id(1)
    chunk = tl.program_id(2)
    start = tl.load(first + 2 * seq)
    stop = tl.load(first + 2 * seq + 1)
    out += seq.to(tl.int64) * out_row + col * out_col
    lse_out += seq * tl.num_programs(1) + col
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    if stop - start > 2 * FEW:
        _merge_column(part, lse, out, lse_out, start, stop, at, col, blocks, chunk == 0, D, N, MANY)
    else:
        _merge_column(part, lse, out, lse_out, start, stop, at, col, blocks, chunk == 0, D, N, FEW)


def merge(part: Tensor, lse: Tensor, plan: Plan, out: Tensor, lse_out: Tensor) -> None:
    """`part [items, blocks, 16, d]` and base-2 `lse [items, blocks, 16]`, both fp32 → `out [B, T, H, d]`
    and natural `lse_out [B, T, H]`; a sequence without items gets zeros and minus infinity.

    A program takes all coordinates where there are columns enough to fill a GPU, else a share of them.
    """
    batch, queries, heads, d = out.shape
    chunk = max(64, min(d, triton.next_power_of_2(batch * queries * heads * d // FILL)))
    _merge_kernel[(batch, queries * heads, d // chunk)](
        part, lse, plan.first, out, lse_out, out.stride(0), out.stride(2), part.shape[1],
        D=d, N=COLUMNS, CHUNK=chunk, FEW=4, MANY=8192 // chunk, num_warps=4,
    )  # fmt: skip
