"""The plan covers every cached token once, whatever the lengths, within its fixed number of items."""

import pytest
import torch

from rolaq.kernels.plan import NOTHING, PACKED, PROTECTED, TILE, make_plan

CASES = [
    ([0], [[0, 0]]),
    ([1, 0, 130], [[0, 0]] * 3),
    ([1000] * 4, [[4, 16]] * 4),
    ([5, 21, 20, 3000], [[4, 16]] * 4),
    ([262144] + [512] * 63, [[4, 0]] * 64),
    ([100_000, 1], [[2, 7], [4, 16]]),
]


@pytest.mark.parametrize(("lengths", "counts"), CASES)
@pytest.mark.parametrize("budget", [8, 264])
def test_every_token_once(lengths, counts, budget, device):
    sink, recent = 4, 16
    n = torch.tensor(lengths, dtype=torch.int32, device=device)
    c = torch.tensor(counts, dtype=torch.int32, device=device)
    plan = make_plan(n, c, sink=sink, recent=recent, budget=budget)
    items, first = plan.items.tolist(), plan.first.tolist()
    assert len(items) == max(budget + len(lengths) // 2, 2 * len(lengths))
    owned = sorted(i for start, stop in first for i in range(start, stop))
    assert owned == list(range(len(owned)))
    assert all(kind == NOTHING for *_, kind in items[len(owned) :])
    for b, length in enumerate(lengths):
        sinks = min(counts[b][0], length)
        recents = min(counts[b][1], length - sinks)
        mine = items[first[b][0] : first[b][1]]
        assert all(seq == b for seq, *_ in mine)
        assert sum(kind == PROTECTED for *_, kind in mine) == (sinks + recents > 0)
        spans = sorted((start, stop) for _, start, stop, kind in mine if kind == PACKED)
        assert [token for span in spans for token in span[:1]] == [sinks, *[stop for _, stop in spans[:-1]]][
            : len(spans)
        ]
        assert (spans[-1][1] if spans else sinks) == length - recents
        assert all(stop > start for start, stop in spans)
    if len(lengths) * 2 <= budget:
        longest = max(stop - start for _, start, stop, kind in items if kind == PACKED) if sum(lengths) else 0
        total = sum(-(-n // TILE) for n in lengths)
        spare = budget - 2 * len(lengths)
        assert longest <= TILE * (-(-total // max(spare, 1)) + 1)


def test_long_items_come_first_and_short_sequences_do_not_lengthen_them(device):
    lengths = torch.tensor([512] * 63 + [262144], dtype=torch.int32, device=device)
    even = torch.full((64,), int(lengths.sum()) // 64, dtype=torch.int32, device=device)

    def spans_of(n):
        items = make_plan(n, budget=132).items.tolist()
        return [stop - start for _, start, stop, kind in items if kind == PACKED]

    spans = spans_of(lengths)
    assert min(spans[:-63]) > max(spans[-63:])
    assert max(spans) <= 1.3 * max(spans_of(even))
