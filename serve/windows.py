"""Sinks and recent tokens: where their BF16 latents lie, and who owns which row.

Every cache slot knows the exact row its latent was last written to (`row_of`), every exact row the slot it
was last written for (`owner`). Every write of a slot sets the first, every write of a row the second. So
where both agree, the row holds the latent of that slot's last write, whatever was freed, evicted or reused
in between: a stale row cannot be read (README.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Protected(NamedTuple):
    """Exact rows of sequences. where `[B, sink + recent]` int32, counts `[B, 2]` int32, as `kernels.Exact`."""

    where: Tensor
    counts: Tensor


class Windows:
    """Tags of one pool, shared by its layers: each layer has `rows` BF16 latents at the same places.

    Request r keeps its last `recent` tokens in a ring, token p in row `r * recent + p % recent`; behind the
    rings lie `entries` places for the sinks of a sequence. Everything runs on the device, in fixed shapes
    but for `write_chunk`, so a decode step can be captured in a CUDA graph.

    Args:
        tokens: cache slots, the padding page included.
        requests: rows of SGLang's request table, the padding row included.
    """

    def __init__(
        self, tokens: int, requests: int, sink: int, recent: int, entries: int, device: torch.device | str
    ) -> None:
        self.requests, self.sink, self.recent = requests, sink, recent
        self.entries = entries if sink else 0
        self.base = requests * recent  # the first sink row
        self.rows = self.base + self.entries * sink
        self.row_of = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        # One owner more than there are rows: what is not exact is tagged there.
        self.owner = torch.full((self.rows + 1,), -1, dtype=torch.int32, device=device)
        self.used = torch.zeros(max(self.entries, 1), dtype=torch.int32, device=device)
        self.clock = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tags."""
        return sum(x.nbytes for x in (self.row_of, self.owner, self.used, self.clock))

    def exact_row(self, slot: Tensor) -> Tensor:
        """The exact row of each slot's latent, -1 where it has none; int64, any shape."""
        row = self.row_of[slot].long()
        return torch.where((row >= 0) & (self.owner[row] == slot), row, -1)

    def write_step(self, request: Tensor, position: Tensor, slot: Tensor, first: Tensor) -> Tensor:
        """Tag one new token of each sequence; returns the exact row to write it to, `[B]` int32, or -1.

        Args, all `[B]` int64: row in the request table, position and slot of the token, slot of position 0.
        """
        row = torch.full_like(slot, -1)
        if self.recent:
            row = request * self.recent + position % self.recent
        if self.sink:
            home = self._entry(first)
            place = self.base + home * self.sink + position
            row = torch.where(position < self.sink, torch.where(home >= 0, place, -1), row)
            self._touch(home)
        return self._tag(slot, row)

    def write_chunk(
        self, request: Tensor, position: Tensor, slot: Tensor, first: Tensor, end: Tensor, starting: Tensor
    ) -> Tensor:
        """Tag the tokens of a prefill chunk; returns the exact row of each, `[n]` int32, or -1.

        Args, `[n]` int64: as in `write_step`, and where the token's chunk ends. starting `[k]` int64: tokens at
        position 0, whose sequences get the places for sinks that were unused for longest.
        """
        row = torch.full_like(slot, -1)
        if self.recent:
            ring = request * self.recent + position % self.recent
            row = torch.where(position >= end - self.recent, ring, row)
        if self.sink:
            fresh = torch.topk(self.used, min(len(starting), self.entries), largest=False).indices
            begin = slot[starting[: len(fresh)]]
            self._tag(begin, self.base + fresh * self.sink)
            home = self._entry(first)
            place = self.base + home * self.sink + position
            row = torch.where(position < self.sink, torch.where(home >= 0, place, -1), row)
            self._touch(home)
        return self._tag(slot, row)

    def begin(self, request: Tensor, last: Tensor, new: Tensor) -> None:
        """Before a prefill: what former requests left in the rings is not for these. request `[B]` int64 rows of the
        table; last `[B]` int64 slots of their last cached tokens; new `[B]` bool: known to start. A request that
        goes on has written its last token itself; where that row is another's, it starts anew, too."""
        if self.recent:
            row = self.exact_row(last)
            own = (row >= 0) & (row < self.base) & (row // self.recent == request)
            rings = self.owner[: self.base].view(self.requests, self.recent)
            rings[request] = torch.where((new | ~own)[:, None], -1, rings[request])

    def protected(self, request: Tensor, length: Tensor, sinks: Tensor, recents: Tensor) -> Protected:
        """Exact rows that stand for the first and last tokens of sequences.

        Args, int64: request and length `[B]`; slots of positions 0 … sink - 1 `[B, sink]`, and of positions
        length - recent … length - 1 `[B, recent]` (anything where a position is negative). Of the recent ones
        a request sees its own alone. Only unbroken runs from the ends count.
        """
        head = self.exact_row(sinks)
        step = torch.arange(self.sink, device=length.device)
        first = (head >= self.base) & (step < length[:, None])
        tail = self.exact_row(recents)
        step = length[:, None] - self.recent + torch.arange(self.recent, device=length.device)
        last = (step >= 0) & (tail >= 0) & (tail < self.base)
        if self.recent:
            last &= tail // self.recent == request[:, None]
        counts = torch.stack((first.cumprod(1).sum(1), last.flip(1).cumprod(1).sum(1)), 1)
        where = torch.cat((head, tail), 1).clamp(min=0)
        return Protected(where.int().contiguous(), counts.int())

    def forget(self, slot: Tensor) -> None:
        """These slots' packed rows were replaced from elsewhere: their exact rows no longer count."""
        self.row_of[slot] = -1

    def in_use(self) -> dict[str, int]:
        """How many exact rows stand for a token now: sinks, recent tokens."""
        row = torch.arange(self.rows, device=self.owner.device)
        slot = self.owner[:-1].long()
        used = (slot >= 0) & (self.row_of[slot] == row)
        return {"sinks": int(used[self.base :].sum()), "recent": int(used[: self.base].sum())}

    def _entry(self, first: Tensor) -> Tensor:
        """The place of a sequence's sinks, told from its first token's slot; -1 where it lost it."""
        row = self.exact_row(first)
        return torch.where(row >= self.base, (row - self.base) // self.sink, -1)

    def _touch(self, entry: Tensor) -> None:
        self.clock += 1
        self.used.scatter_reduce_(
            0, entry.clamp(min=0), torch.where(entry >= 0, self.clock, 0), reduce="amax"
        )

    def _tag(self, slot: Tensor, row: Tensor) -> Tensor:
        narrow = row.int()
        self.row_of[slot] = narrow
        self.owner[torch.where(row >= 0, row, self.rows)] = slot.int()
        return narrow
