"""Windows against a dictionary that remembers every write, under random requests, reuse and eviction."""

from __future__ import annotations

import random

import pytest
import torch

from rolaq.serve.windows import Windows

PAGE = 8


class Model:
    """A cache of `pages` pages in which a token's latent is a unique number; `exact` are the protected rows."""

    def __init__(
        self, sink: int, recent: int, entries: int, seed: int, pages: int = 40, requests: int = 5
    ) -> None:
        self.random = random.Random(seed)
        self.windows = Windows(pages * PAGE, requests, sink, recent, entries, "cpu")
        self.latent = torch.zeros(pages * PAGE, dtype=torch.int64)
        self.exact = torch.full((self.windows.rows,), -7)
        self.free_pages = list(range(1, pages))
        self.free_requests = list(range(1, requests))
        self.running: dict[int, list[int]] = {}  # request: slots by position
        self.written: dict[int, int] = {}  # request: first position it wrote itself
        self.cached: list[list[int]] = []  # whole pages of ended requests
        self.count = 0

    def slots(self, have: int, total: int, pages: list[int]) -> list[int]:
        return [pages[p // PAGE] * PAGE + p % PAGE for p in range(have, total)]

    def put(self, slots: list[int], rows: torch.Tensor) -> None:
        for slot, row in zip(slots, rows.tolist(), strict=True):
            self.count += 1
            self.latent[slot] = self.count
            if row >= 0:
                self.exact[row] = self.count

    def start(self) -> None:
        prefix: list[int] = []
        if self.cached and self.random.random() < 0.6:
            whole = self.random.choice(self.cached)
            prefix = whole[: PAGE * self.random.randint(1, len(whole) // PAGE)]
        total = len(prefix) + self.random.randint(1, 3 * PAGE)
        need = -(-total // PAGE) - len(prefix) // PAGE
        while len(self.free_pages) < need and self.cached:
            self.evict()
        if (
            not self.free_requests
            or len(self.free_pages) < need
            or any(s // PAGE in self.free_pages for s in prefix)
        ):
            return
        request = self.free_requests.pop(self.random.randrange(len(self.free_requests)))
        self.running[request], self.written[request] = list(prefix), len(prefix)
        self.windows.begin(torch.tensor([request]), torch.tensor(prefix[-1:] or [0]), torch.tensor([True]))
        self.chunk(request, total)

    def chunk(self, request: int, total: int) -> None:
        have = self.running[request]
        begin = len(have)
        pages = [s // PAGE for s in have[::PAGE]]
        pages += [self.free_pages.pop() for _ in range(-(-total // PAGE) - len(pages))]
        have += self.slots(begin, total, pages)
        n = total - begin
        rows = self.windows.write_chunk(
            torch.full((n,), request), torch.arange(begin, total), torch.tensor(have[begin:]),
            torch.full((n,), have[0]), torch.full((n,), total), torch.tensor([0] if begin == 0 else [], dtype=torch.int64),
        )  # fmt: skip
        self.put(have[begin:], rows)

    def step(self) -> None:
        batch = [r for r, have in self.running.items() if len(have) % PAGE or self.free_pages]
        for request in batch:
            have = self.running[request]
            if len(have) % PAGE == 0 and not self.free_pages:
                continue
            page = have[-1] // PAGE if len(have) % PAGE else self.free_pages.pop()
            have.append(page * PAGE + len(have) % PAGE)
            at = (
                torch.tensor([request]),
                torch.tensor([len(have) - 1]),
                torch.tensor(have[-1:]),
                torch.tensor(have[:1]),
            )
            self.put(have[-1:], self.windows.write_step(*at))

    def end(self) -> None:
        if self.running:
            request = self.random.choice(list(self.running))
            have = self.running.pop(request)
            self.free_requests.append(request)
            whole = len(have) // PAGE * PAGE
            shared = {s // PAGE for c in [*self.cached, *self.running.values()] for s in c}
            if whole and self.random.random() < 0.7:
                self.cached.append(have[:whole])
                shared |= {s // PAGE for s in have[:whole]}
            self.free_pages += sorted({s // PAGE for s in have} - shared - set(self.free_pages))

    def evict(self) -> None:
        gone = {s // PAGE for s in self.cached.pop(self.random.randrange(len(self.cached)))}
        kept = {s // PAGE for c in [*self.cached, *self.running.values()] for s in c}
        self.free_pages += sorted(gone - kept)

    def check(self, request: int) -> tuple[int, int]:
        have, w = self.running[request], self.windows
        n = len(have)
        recents = torch.tensor([[have[max(n - w.recent + k, 0)] for k in range(w.recent)]], dtype=torch.int64)
        sinks = torch.tensor([[have[0] // PAGE * PAGE + i for i in range(w.sink)]], dtype=torch.int64)
        where, counts = w.protected(
            torch.tensor([request]), torch.tensor([n]), sinks.view(1, w.sink), recents.view(1, w.recent)
        )
        s, r = counts[0].tolist()
        for i in range(s):
            assert self.exact[where[0, i]] == self.latent[have[i]], "stale sink"
        for k in range(r):
            assert self.exact[where[0, w.sink + w.recent - 1 - k]] == self.latent[have[n - 1 - k]], (
                "stale recent row"
            )
        assert r == max(min(w.recent, n - max(self.written[request], w.sink)), 0)
        return s, r


@pytest.mark.parametrize(
    ("sink", "recent", "entries"), [(4, 5, 12), (4, 16, 9), (0, 5, 3), (3, 0, 9), (0, 0, 1), (4, 5, 2)]
)
@pytest.mark.parametrize("seed", range(4))
def test_no_stale_row_is_ever_read(sink: int, recent: int, entries: int, seed: int) -> None:
    model = Model(sink, recent, entries, seed)
    for _ in range(150):
        action = model.random.random()
        if action < 0.3:
            model.start()
        elif action < 0.45:
            model.end()
        elif action < 0.55 and model.running:
            request = model.random.choice(list(model.running))
            total = len(model.running[request]) + model.random.randint(1, PAGE)
            if len(model.free_pages) > 2:
                model.chunk(request, total)
        else:
            model.step()
        for request, have in model.running.items():
            s, _ = model.check(request)
            if (
                model.written[request] == 0 and entries >= 9
            ):  # more places than requests: never lost while running
                assert s == min(sink, len(have))


def test_sinks_survive_a_prefix_hit_until_their_place_is_needed() -> None:
    model = Model(4, 4, 2, seed=0)
    w = model.windows
    first = torch.arange(8)

    def prefill(request: int, page: int) -> None:
        slots = first + page * PAGE
        begin = torch.full((8,), page * PAGE)
        w.write_chunk(torch.full((8,), request), first, slots, begin, torch.full((8,), 8), torch.tensor([0]))

    def sinks(page: int) -> int:
        slots = (torch.arange(4) + page * PAGE)[None]
        recents = torch.zeros(1, 4, dtype=torch.int64)
        return int(w.protected(torch.tensor([4]), torch.tensor([8]), slots, recents).counts[0, 0])

    prefill(1, 1)
    prefill(2, 2)
    assert (sinks(1), sinks(2)) == (4, 4)
    prefill(1, 3)  # two places: the one unused for longest goes
    assert (sinks(1), sinks(2), sinks(3)) == (0, 4, 4)
    w.forget(torch.arange(4) + 2 * PAGE)
    assert sinks(2) == 0
    assert w.in_use()["sinks"] == 4


def test_a_ring_is_kept_by_the_request_that_wrote_its_last_token_alone() -> None:
    def written() -> Windows:
        w, slots = Windows(16 * PAGE, 4, 0, 4, 1, "cpu"), torch.arange(PAGE) + 3 * PAGE
        full = torch.full((PAGE,), 2)
        w.write_chunk(full, torch.arange(PAGE), slots, slots, torch.full((PAGE,), PAGE), torch.tensor([0]))
        return w

    def left(request: int, new: bool) -> int:
        w = written()
        w.begin(torch.tensor([request]), torch.tensor([4 * PAGE - 1]), torch.tensor([new]))
        return w.in_use()["recent"]

    assert left(2, new=False) == 4  # the next chunk of a long prompt
    assert left(2, new=True) == 0  # another request in the same row
    assert left(1, new=False) == 4  # another row over the same tokens: its own ring is empty and stays so
    w = written()
    w.owner[8:12] = torch.tensor([7, 7, 7, 7])  # the row's ring was taken since
    w.begin(torch.tensor([2]), torch.tensor([4 * PAGE - 1]), torch.tensor([False]))
    assert (w.owner[8:12] == -1).all()
