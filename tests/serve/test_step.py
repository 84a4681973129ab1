"""The step kernel against the plain torch windows, over a random history of one request table."""

from __future__ import annotations

import os

import pytest
import torch

from rolaq.serve.windows import Windows

PAGE = 64


def history(windows: Windows, requests: torch.Tensor, lengths: dict[int, int], seed: int) -> None:
    """Prefill each request's tokens; some rows are then lost, as to later owners."""
    for request, n in lengths.items():
        slots = requests[request, :n].long()
        at = torch.arange(n)
        full = torch.full((n,), request)
        windows.write_chunk(full, at, slots, slots[:1].expand(n), torch.full((n,), n), torch.tensor([0]))
    lost = torch.randint(
        0, windows.rows + 1, (windows.rows // 4,), generator=torch.Generator().manual_seed(seed)
    )
    windows.owner[lost] = 0


@pytest.mark.parametrize(("sink", "recent"), [(4, 16), (0, 5), (3, 0), (1, 1), (0, 0), (4, 60)])
@pytest.mark.parametrize("seed", range(3))
def test_kernel_equals_torch(sink: int, recent: int, seed: int) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs under Triton's interpreter (TRITON_INTERPRET=1)")
    from rolaq.serve.step import decode_step

    g = torch.Generator().manual_seed(seed)
    context, count = 5 * PAGE, 6
    pages = torch.randperm(count * 5, generator=g).view(count, 5) + 1
    table = (pages[..., None] * PAGE + torch.arange(PAGE)).view(count, -1).int()
    lengths = {r: int(torch.randint(1, context - 1, (), generator=g)) for r in range(1, count)}
    lengths |= {1: 1, 2: max(sink - 1, 1)}
    mine, theirs = (Windows(count * 5 * PAGE + 2 * PAGE, count, sink, recent, 9, "cpu") for _ in range(2))
    for w in (mine, theirs):
        history(w, table, lengths, seed)
    request = torch.tensor(list(lengths))
    length = torch.tensor([n + 1 for n in lengths.values()])
    slot = table[request, length - 1].long()
    got_table, got_length, row, got = decode_step(mine, table, request, length, slot, PAGE)
    want = theirs.write_step(request, length - 1, slot, table[request, 0].long())
    head = table[request][:, :sink].long()
    tail = table[request[:, None], (length[:, None] - recent + torch.arange(recent)).clamp(min=0)].long()
    expected = theirs.protected(request, length, head, tail)
    assert torch.equal(row, want)
    assert torch.equal(got_length, length.int())
    for b in range(len(request)):
        used = -(-int(length[b]) // PAGE)
        assert torch.equal(got_table[b, :used], table[request[b], : used * PAGE : PAGE] // PAGE)
        s, r = expected.counts[b].tolist()
        assert got.counts[b].tolist() == [s, r]
        assert torch.equal(got.where[b, :s], expected.where[b, :s])
        assert torch.equal(got.where[b, sink + recent - r :], expected.where[b, sink + recent - r :])
    assert torch.equal(mine.row_of, theirs.row_of)
    assert torch.equal(mine.owner[:-1], theirs.owner[:-1])
    assert torch.equal(mine.used, theirs.used)
