"""Merge the partial results of a sequence's work items by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    part, lse, first, out, lse_out, out_row, out_col,
    COLS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`part [item, block, D, N]` fp32 and base-2 `lse [item, block, N]` → `out`, natural `lse_out`.

    A program takes CHUNK coordinates of one sequence and column block. A sequence without items gets
    zeros and minus infinity.
    """
    seq = tl.program_id(0)
    block = tl.program_id(1)
    chunk = tl.program_id(2)
    blocks = tl.num_programs(1)
    start = tl.load(first + seq)
    stop = tl.load(first + seq + 1)
    i = tl.arange(0, ITEMS)
    col = tl.arange(0, N)
    at = tl.arange(0, CHUNK)
    top = tl.full([N], float("-inf"), tl.float32)
    weight = tl.zeros([N], tl.float32)
    acc = tl.zeros([CHUNK, N], tl.float32)
    for begin in range(start, stop, ITEMS):
        row = (begin + i) * blocks + block
        ok = begin + i < stop
        x = tl.load(lse + row[:, None] * N + col[None, :], mask=ok[:, None], other=float("-inf"))
        pos = (row.to(tl.int64) * (D * N))[:, None, None]
        pos += ((chunk * CHUNK + at) * N)[None, :, None] + col[None, None, :]
        y = tl.load(part + pos, mask=ok[:, None, None], other=0.0)
        new = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2(x - base[None, :])
        keep = tl.exp2(top - base)
        weight = weight * keep + tl.sum(w, 0)
        acc = acc * keep[None, :] + tl.sum(w[:, None, :] * y, 0)
        top = new
    acc = acc / tl.where(weight > 0.0, weight, 1.0)[None, :]
    c = block * N + col
    pos = out + seq.to(tl.int64) * out_row + (c * out_col)[None, :] + (chunk * CHUNK + at)[:, None]
    tl.store(pos, acc.to(out.dtype.element_ty), mask=(c < COLS)[None, :])
    if chunk == 0:
        log = tl.where(weight > 0.0, (top + tl.log2(weight)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_out + seq * COLS + c, log, mask=c < COLS)
