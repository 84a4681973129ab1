"""Decode against fp32 attention over the dequantized rows: values, LSE, corners, graphs."""

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.kernels.cases import CORNER, SMALL, Case, build, poisoned
from rolaq.kernels.decode import decode, make_workspace
from rolaq.kernels.plan import make_plan
from rolaq.kernels.reference import decode_reference

IMPLEMENTATIONS = ["portable", "tensor-core"] if torch.cuda.is_available() else ["portable"]


def compare(case, device, impl):
    arguments = build(case, device)
    want, want_lse = decode_reference(**arguments)
    q, exact = arguments["q"], arguments["exact"]
    blocks = -(-case.queries * case.heads // 16)
    plan = make_plan(
        arguments["lengths"], exact and exact.counts, sink=case.sink, recent=case.recent, blocks=blocks
    )
    workspace = make_workspace(plan, case.queries, case.heads, case.d)
    for x in workspace:
        x.fill_(float("nan"))
    dtype = torch.bfloat16 if q.is_cuda else torch.float32
    out = poisoned(*q.shape, dtype=dtype, device=device)
    lse = poisoned(*q.shape[:3], device=device)
    decode(**arguments, plan=plan, workspace=workspace, out=out, lse=lse, impl=impl)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    assert not torch.isnan(lse).any() and torch.isfinite(out).all()
    finite = torch.isfinite(want_lse)
    if finite.any():
        # BF16 rounds probabilities (2^-9, random) and the output once more
        assert (lse - want_lse)[finite].abs().max() <= 1e-3
        error = (out.float() - want)[finite].norm() / want[finite].norm()
        assert error <= (3e-3 if q.is_cuda else 5e-5), f"relative error {error:.2e}"
    assert (out[~finite] == 0).all()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_small(case, impl, device):
    compare(case, device, impl)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CORNER, ids=lambda case: case.name)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_corner(case, impl, device):
    compare(case, device, impl)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(device):
    arguments = build(Case((3000, 700)), device)
    lengths, q = arguments["lengths"], arguments["q"]
    plan = make_plan(lengths)
    workspace = make_workspace(plan, 1, 16, 512)
    out, lse = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty(q.shape[:3], device=device),
    )

    def step():
        make_plan(lengths, out=plan)
        decode(**arguments, plan=plan, workspace=workspace, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([3000, 700], [1, 0], [64, 65], [0, 699]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        want, want_lse = decode_reference(**arguments)
        assert torch.allclose(lse, want_lse, atol=1e-3)
        assert (out.float() - want).norm() <= 3e-3 * want.norm()


def test_what_was_not_built_is_refused_by_name(device):
    arguments = build(SMALL[0], device)
    with pytest.raises(RolaqError, match="rows must be"):
        decode(**{**arguments, "rows": arguments["rows"][:, :-1]})
    with pytest.raises(RolaqError, match="Unknown decode kernel 'fast'"):
        decode(**arguments, impl="fast")
    with pytest.raises(RolaqError, match="page_size"):
        decode(**{**arguments, "page_size": 0})
