"""Work items of a decode step: how a batch's cached tokens are split over the GPU's programs.

One plan serves every layer of a step. Its shapes depend on the batch size alone, so a CUDA graph that
captured it stays valid for any lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # tokens: the granularity of a split
COST = 3  # what an item takes besides its tiles, in tiles
NOTHING, PACKED, PROTECTED = 0, 1, 2  # kinds of an item


class Plan(NamedTuple):
    """items `[n, 4]` int32 (sequence, first token, last token + 1, kind); first `[B, 2]` int32.

    Sequence b owns items `first[b, 0] … first[b, 1] - 1`; those that no sequence owns, all at the end,
    are of kind 0. Long items come first, so that short ones fill what those leave idle.
    """

    items: Tensor
    first: Tensor


@triton.jit
def _plan_kernel(
    lengths, counts, items, first, batch, budget, max_items, min_tiles,
    SINK: tl.constexpr, RECENT: tl.constexpr, TILE: tl.constexpr, COST: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Program b writes the items of sequence b; every program finds the common split size itself."""
    b = tl.program_id(0)
    i = tl.arange(0, BATCH)
    n = tl.load(lengths + i, mask=i < batch, other=0)
    sinks = tl.zeros_like(n)
    recents = tl.zeros_like(n)
    if SINK + RECENT > 0:
        sinks = tl.minimum(tl.load(counts + 2 * i, mask=i < batch, other=0), tl.minimum(n, SINK))
        recents = tl.minimum(tl.load(counts + 2 * i + 1, mask=i < batch, other=0), RECENT)
        recents = tl.minimum(recents, n - sinks)
    # Splits fall on multiples of TILE, counted from the first token whatever the sinks.
    tiles = tl.where(n > sinks + recents, (n - recents + TILE - 1) // TILE - sinks // TILE, 0)
    protected = (sinks + recents > 0).to(tl.int32)
    # The smallest split whose work fits: an item takes its tiles and COST more. Where none fits, one item
    # a sequence.
    low = min_tiles
    high = tl.maximum(tl.max(tiles, 0), min_tiles)
    work = tl.sum(tiles, 0)
    while low < high:
        middle = (low + high) // 2
        number = tl.sum((tiles + middle - 1) // middle + protected, 0)
        fits = (number <= max_items) & (work + COST * number <= budget * (middle + COST))
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    splits = (tiles + low - 1) // low
    count = splits + protected
    early = 2 * tiles > low * splits
    ahead = tl.where(early, count, 0)
    behind = tl.where(early, 0, count)
    start = tl.where(early, tl.cumsum(ahead, 0) - count, tl.sum(ahead, 0) + tl.cumsum(behind, 0) - count)
    total = tl.sum(count, 0)
    mine = i == b
    at = tl.sum(tl.where(mine, start, 0), 0)
    n = tl.sum(tl.where(mine, n, 0), 0)
    sinks = tl.sum(tl.where(mine, sinks, 0), 0)
    recents = tl.sum(tl.where(mine, recents, 0), 0)
    tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    splits = tl.sum(tl.where(mine, splits, 0), 0)
    tl.store(first + 2 * b, at)
    tl.store(first + 2 * b + 1, at + tl.sum(tl.where(mine, count, 0), 0))
    if sinks + recents > 0:
        tl.store(items + 4 * at, b)
        tl.store(items + 4 * at + 1, 0)
        tl.store(items + 4 * at + 2, n)
        tl.store(items + 4 * at + 3, 2)
        at += 1
    lane = tl.arange(0, 128)
    for block in range(0, splits, 128):
        s = block + lane
        ok = s < splits
        begin = (sinks // TILE + (s.to(tl.int64) * tiles // tl.maximum(splits, 1)).to(tl.int32)) * TILE
        end = (sinks // TILE + ((s + 1).to(tl.int64) * tiles // tl.maximum(splits, 1)).to(tl.int32)) * TILE
        tl.store(items + 4 * (at + s), b, mask=ok)
        tl.store(items + 4 * (at + s) + 1, tl.maximum(begin, sinks), mask=ok)
        tl.store(items + 4 * (at + s) + 2, tl.minimum(end, n - recents), mask=ok)
        tl.store(items + 4 * (at + s) + 3, 1, mask=ok)
    if b == 0:
        for block in range(total, max_items, 128):
            tl.store(items + 4 * (block + lane) + 3, 0, mask=block + lane < max_items)


def resident_programs(device: torch.device, per_multiprocessor: int = 2) -> int:
    """How many decode programs a GPU runs at once; 8 where there is none (the interpreter)."""
    if device.type != "cuda":
        return 8
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def make_plan(
    lengths: Tensor,
    counts: Tensor | None = None,
    *,
    sink: int = 0,
    recent: int = 0,
    blocks: int = 1,
    budget: int | None = None,
    min_tiles: int = 1,
    out: Plan | None = None,
) -> Plan:
    """Split `lengths [B]` int32 into work items; `counts [B, 2]` int32 are the protected rows in use.

    `blocks` is the number of 16-column blocks of a query (`decode.column_blocks`). Pass `out` to write
    into an earlier plan's tensors, as a captured graph must.
    """
    batch = lengths.shape[0]
    budget = budget or max(resident_programs(lengths.device) // blocks, 1)
    size = max(budget + batch // 2, 2 * batch)  # a full load, and room for short sequences beside it
    if out is None:
        out = Plan(
            torch.empty(size, 4, dtype=torch.int32, device=lengths.device),
            torch.empty(batch, 2, dtype=torch.int32, device=lengths.device),
        )
    _plan_kernel[(batch,)](
        lengths, lengths if counts is None else counts, out.items, out.first, batch, budget,
        out.items.shape[0], min_tiles, SINK=sink if counts is not None else 0,
        RECENT=recent if counts is not None else 0, TILE=TILE, COST=COST, BATCH=triton.next_power_of_2(batch),
    )  # fmt: skip
    return out
