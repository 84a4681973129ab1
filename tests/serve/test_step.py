"""The step kernel against the plain torch windows, over a random history of one request table."""

from __future__ import annotations

import os
import subprocess
import sys

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


SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rolaq.serve.step import _step_kernel as kernel

sink, recent, wide = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
constants = dict(SINK=sink, RECENT=recent, PAGE=64, BLOCK=1024, N=max(triton.next_power_of_2(max(sink, recent)), 2))
kinds = {"request": f"*{wide}", "length": f"*{wide}", "slot": "*i64", **dict.fromkeys(("stride", "pages", "base", "trash"), "i32")}
types = {n: "constexpr" if n in constants else kinds.get(n, "*i32") for n in kernel.arg_names}
source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
"""


@pytest.mark.parametrize(
    ("sink", "recent", "wide"), [(4, 16, "i64"), (4, 8, "i32"), (0, 0, "i64"), (0, 5, "i64"), (3, 0, "i64")]
)
def test_kernel_compiles_for_a_gpu(sink: int, recent: int, wide: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", SCRIPT, str(sink), str(recent), wide]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
