"""What the layers of a forward share: page table, windows, plan of a decode step; bounds and prefixes of a prefill."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolaq.kernels.decode import column_blocks, make_workspace
from rolaq.kernels.plan import Plan, make_plan
from rolaq.serve.chunks import Chunk, Prefill, bounds_of, overlay, positions, split
from rolaq.serve.step import decode_step
from rolaq.serve.windows import Protected, Windows


class Step(NamedTuple):
    """One decode step's inputs to every layer: see `kernels.decode`."""

    table: Tensor
    lengths: Tensor
    exact_row: Tensor
    protected: Protected
    plan: Plan | None
    workspace: tuple[Tensor, Tensor] | None


class Batches:
    """Makes `Step` and `Prefill` of SGLang's batches.

    Args:
        requests: SGLang's request table `[R, context]` int32.
        page: tokens of a page.
        heads, latent: query heads of this process, d.
        capacity: tokens of one chunk of a cached prefix.
    """

    def __init__(
        self, windows: Windows, requests: Tensor, *, page: int, heads: int, latent: int, capacity: int
    ) -> None:
        self.windows, self.requests, self.device = windows, requests, requests.device
        self.page, self.heads, self.latent, self.capacity = page, heads, latent, capacity
        self.ends: OrderedDict[str, int] = OrderedDict()  # where the last chunks of requests ended

    def step(self, request: Tensor, length: Tensor, slots: Tensor) -> Step:
        """One decode step, from device tensors `[B]` alone: row in the request table, length with the new token, its slot."""
        if not length.is_cuda:
            return self._step_reference(request.long(), length.long(), slots.long())
        s = self.windows
        table, lengths, exact_row, protected = decode_step(
            s, self.requests, request, length, slots, self.page
        )
        counts = protected.counts if s.sink + s.recent else None
        plan = make_plan(lengths, counts, sink=s.sink, recent=s.recent, blocks=column_blocks(1, self.heads))
        workspace = make_workspace(plan, 1, self.heads, self.latent)
        return Step(table, lengths, exact_row, protected, plan, workspace)

    def _step_reference(self, request: Tensor, length: Tensor, slots: Tensor) -> Step:
        """`step.decode_step` in plain torch, for CPUs."""
        table = self.requests[:, :: self.page].index_select(0, request) // self.page
        exact_row = self.windows.write_step(request, length - 1, slots, table[:, 0].long() * self.page)
        return Step(table, length.int(), exact_row, self._protected(request, length), None, None)

    def _protected(self, request: Tensor, length: Tensor) -> Protected:
        """Windows of sequences as long as `length [B]`."""
        s = self.windows
        head = torch.arange(s.sink, device=length.device).expand(len(request), -1)
        tail = (length[:, None] - s.recent + torch.arange(s.recent, device=length.device)).clamp(min=0)
        at = torch.cat((head, tail), 1)
        slots = self.requests[request[:, None], at].long()
        return s.protected(request, length, slots[:, : s.sink], slots[:, s.sink :])

    def prefill(self, batch: Any) -> Prefill:
        """One prefill step, from SGLang's `ForwardBatch`."""
        prefixes, lengths = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        request = batch.req_pool_indices.long()
        cached, new = torch.tensor(prefixes, device=self.device), self._new(batch.rids, prefixes, lengths)
        last = self.requests[request, (cached - 1).clamp(min=0)].long()
        self.windows.begin(request, last, torch.tensor(new, device=self.device))
        chunks = []
        if any(prefixes):
            past = self._protected(request, cached)
            chunks = [self._chunk(request, r, prefixes, past) for r in split(prefixes, self.capacity)]
        ranges = [(p, p + n) for p, n in zip(prefixes, lengths, strict=True)]
        sequence, position = positions(ranges, self.device)
        bounds = bounds_of(lengths, self.device)
        starting = bounds[:-1].long()[[b for b, (begin, end) in enumerate(ranges) if begin == 0 < end]]
        exact_row = self.windows.write_chunk(
            request[sequence], position, batch.out_cache_loc[: len(position)].long(),
            self.requests[request, 0].long()[sequence],
            torch.tensor([end for _, end in ranges], device=self.device)[sequence], starting,
        )  # fmt: skip
        return Prefill(bounds, max(lengths, default=0), exact_row, chunks)

    def _new(self, names: list[str] | None, prefixes: list[int], lengths: list[int]) -> list[bool]:
        """Which requests of the batch do not go on where their last chunk ended."""
        if names is None:  # a dummy batch
            return [True] * len(prefixes)
        ends = [self.ends.pop(name, None) for name in names]
        self.ends.update(zip(names, map(sum, zip(prefixes, lengths, strict=True)), strict=True))
        while len(self.ends) > 2 * self.windows.requests:
            self.ends.popitem(last=False)
        return [end != prefix for end, prefix in zip(ends, prefixes, strict=True)]

    def _chunk(
        self, request: Tensor, ranges: list[tuple[int, int]], prefixes: list[int], past: Protected
    ) -> Chunk:
        sequence, position = positions(ranges, self.device)
        places, entries = overlay(ranges, prefixes, self.windows.sink, self.windows.recent)
        entry = torch.tensor(entries, dtype=torch.int64, device=self.device)
        rows = past.where.view(-1)[entry].long()
        # An entry counts where it belongs to the unbroken run from its end of the sequence.
        width = self.windows.sink + self.windows.recent
        b, i = entry // max(width, 1), entry % max(width, 1)
        sinks, recents = past.counts[b].unbind(1)
        counted = torch.where(i < self.windows.sink, i < sinks, i >= width - recents)
        return Chunk(
            self.requests[request[sequence], position].long(),
            bounds_of([e - a for a, e in ranges], self.device),
            max(e - a for a, e in ranges),
            torch.tensor(places, dtype=torch.int64, device=self.device),
            torch.where(counted, rows, -1),
        )
