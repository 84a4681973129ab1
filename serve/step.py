"""A decode step's page table and windows in one kernel; `batches.Batches` has the same in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolaq.serve.windows import Protected

if TYPE_CHECKING:
    from rolaq.serve.windows import Windows

PAGES = 1024  # page table entries of one program


@triton.jit
def _place(
    line,
    row_of,
    owner,
    used,
    clock,
    request,
    position,
    new,
    base,
    trash,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
):
    """Tag the new token; returns its exact row or -1 (`Windows.write_step`)."""
    row = tl.full([], -1, tl.int32)
    if RECENT > 0:
        row = request * RECENT + position % RECENT
    if SINK > 0:
        first = tl.load(line)
        home = tl.load(row_of + first)
        kept = (home >= base) & (tl.load(owner + tl.maximum(home, 0)) == first)
        entry = (home - base) // SINK
        sink = tl.where(kept, base + entry * SINK + position, -1)
        row = tl.where(position < SINK, sink, row)
        tl.atomic_max(used + entry, tl.load(clock), mask=kept)
    tl.store(row_of + new, row)
    tl.store(owner + tl.where(row >= 0, row, trash), new)
    return row


@triton.jit
def _exact(line, row_of, owner, position, inside, last, row):
    """Exact rows of positions, -1 where there is none; the new token's tags may not be visible yet."""
    slot = tl.load(line + position, mask=inside, other=0)
    found = tl.load(row_of + slot, mask=inside, other=-1)
    owned = tl.load(owner + tl.maximum(found, 0)) == slot
    found = tl.where(inside & owned, found, -1)
    return tl.where(position == last, row, found)


@triton.jit
def _step_kernel(
    requests, request, length, slot, row_of, owner, used, clock, table, lengths, exact_row, where, counts,
    stride, pages, base, trash,
    SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (b, part): a part of sequence b's page table; part 0 also its windows."""
    b = tl.program_id(0)
    part = tl.program_id(1)
    r = tl.load(request + b).to(tl.int32)
    n = tl.load(length + b).to(tl.int32)
    line = requests + r.to(tl.int64) * stride
    i = part * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(line + i * PAGE, mask=(i < pages) & (i * PAGE < n), other=0) // PAGE
    tl.store(table + b.to(tl.int64) * pages + i, page, mask=i < pages)
    if part == 0:
        new = tl.load(slot + b).to(tl.int32)
        row = _place(line, row_of, owner, used, clock, r, n - 1, new, base, trash, SINK, RECENT)
        tl.store(lengths + b, n)
        tl.store(exact_row + b, row)
        k = tl.arange(0, N)
        if SINK > 0:
            found = _exact(line, row_of, owner, k, (k < SINK) & (k < n), n - 1, row)
            tl.store(where + b * (SINK + RECENT) + k, tl.maximum(found, 0), mask=k < SINK)
            tl.store(
                counts + 2 * b, tl.min(tl.where((k < SINK) & (found >= base), N, tl.minimum(k, SINK)), 0)
            )
        else:
            tl.store(counts + 2 * b, 0)
        if RECENT > 0:
            position = n - RECENT + k
            found = _exact(line, row_of, owner, position, (k < RECENT) & (position >= 0), n - 1, row)
            tl.store(where + b * (SINK + RECENT) + SINK + k, tl.maximum(found, 0), mask=k < RECENT)
            own = (k >= RECENT) | ((found >= 0) & (found < base) & (found // RECENT == r))
            tl.store(counts + 2 * b + 1, RECENT - 1 - tl.max(tl.where(own, -1, k), 0))
        else:
            tl.store(counts + 2 * b + 1, 0)


def decode_step(
    windows: Windows, requests: Tensor, request: Tensor, length: Tensor, slot: Tensor, page: int
) -> tuple[Tensor, Tensor, Tensor, Protected]:
    """Page table `[B, pages]`, lengths `[B]`, exact rows of the new tokens `[B]`, all int32, and the windows.

    requests `[R, context]` int32 is SGLang's request table; request, length and slot `[B]` integers say where
    each sequence stands in it, how long it is with its new token, and where that goes.
    """
    batch, pages, width = len(request), -(-requests.shape[1] // page), windows.sink + windows.recent
    device = request.device
    table = torch.empty(batch, pages, dtype=torch.int32, device=device)
    lengths, exact_row = torch.empty(2, batch, dtype=torch.int32, device=device).unbind(0)
    where = torch.empty(batch, max(width, 1), dtype=torch.int32, device=device)[:, :width]
    counts = torch.empty(batch, 2, dtype=torch.int32, device=device)
    windows.clock += 1
    _step_kernel[(batch, triton.cdiv(pages, PAGES))](
        requests, request, length, slot, windows.row_of, windows.owner, windows.used, windows.clock, table,
        lengths, exact_row, where, counts, requests.stride(0), pages, windows.base, windows.rows,
        SINK=windows.sink, RECENT=windows.recent, PAGE=page, BLOCK=PAGES,
        N=max(triton.next_power_of_2(max(windows.sink, windows.recent)), 2),
    )  # fmt: skip
    return table, lengths, exact_row, Protected(where, counts)
