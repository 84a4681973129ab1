"""Decode: ours and the BF16 kernels that are installed, on one case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels import baselines
from rolaq.kernels.cases import Case
from rolaq.kernels.decode import column_blocks, decode, make_workspace
from rolaq.kernels.exact import Exact
from rolaq.kernels.plan import make_plan
from rolaq.kernels.reference import decode_reference
from rolaq.kernels.timing import Row, graph_ms, page_tables, timed
from rolaq.quant.spec import bf16_bytes_per_token


def bench_decode(name: str, case: Case, rows: Tensor, bf16: Tensor, rate: float, rest: bool) -> list[Row]:
    """Rows of one case: ours, and with `rest` the BF16 kernels that are installed."""
    batch, d, d_r = len(case.lengths), case.d, case.d_r
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    tables = page_tables(case.lengths)
    q = torch.randn(batch, case.queries, case.heads, d + d_r, device="cuda").bfloat16()
    exact = _protected(case) if case.sink + case.recent else None
    fixed = {
        "q": q[..., :d], "q_rope": q[..., d:], "rows": rows, "lengths": lengths, "page_size": 64,
        "scale": (d / 4 + d_r) ** -0.5, "exact": exact,
    }  # fmt: skip
    shape = {
        "kernel": "decode", "case": name, "batch": batch, "tokens": max(case.lengths), "heads": case.heads, "d": d,
    }  # fmt: skip
    tokens = sum(case.lengths)
    calls, out = _calls(case, fixed, tables)
    ms = graph_ms(calls)
    more: dict[str, Any] = {"rel_err": _error(case, fixed, tables[-1], out), **_resources()}
    found = [timed(shape, "int2", ms, tokens * rows.shape[1], rate, **more)]
    if rest and exact is None:
        for impl, ms, more in _bf16(case, q, bf16, tables, lengths, fixed["scale"]):
            found.append(timed(shape, impl, ms, tokens * bf16_bytes_per_token(d, d_r), rate, **more))
    return found


def _calls(case: Case, fixed: dict[str, Any], tables: list[Tensor]) -> tuple[list[Callable[[], Any]], Tensor]:
    """A call for each page table, and the output that they share."""
    q, exact = fixed["q"], fixed["exact"]
    plan = make_plan(
        fixed["lengths"], exact and exact.counts, sink=case.sink, recent=case.recent,
        blocks=column_blocks(case.queries, case.heads),
    )  # fmt: skip
    same: dict[str, Any] = {
        "plan": plan,
        "workspace": make_workspace(plan, case.queries, case.heads, case.d),
        "out": torch.empty_like(q, memory_format=torch.contiguous_format),
        "lse": torch.empty(q.shape[:3], device="cuda"),
    }

    def call(table: Tensor) -> Callable[[], Any]:
        return lambda: decode(**fixed, **same, page_table=table)

    return [call(table) for table in tables], same["out"]


def _protected(case: Case) -> Exact:
    """All protected rows of every sequence, in use."""
    batch, width = len(case.lengths), case.sink + case.recent
    latents = torch.randn(batch * width, case.d, device="cuda").bfloat16()
    index = torch.arange(batch * width, dtype=torch.int32, device="cuda").view(batch, width)
    counts = torch.tensor([[case.sink, case.recent]] * batch, dtype=torch.int32, device="cuda")
    return Exact(latents, index, counts, case.sink, case.recent)


def _error(case: Case, fixed: dict[str, Any], table: Tensor, out: Tensor) -> float | None:
    """Relative error of the last call's output on up to four sequences that fit an fp32 reference."""
    few = {**fixed, "page_table": table[:2]}
    few |= {key: fixed[key][:2] for key in ("q", "q_rope", "lengths")}
    if case.queries * case.heads * max(case.lengths[:2]) > 1 << 25:
        return None
    if few["exact"] is not None:
        few["exact"] = few["exact"]._replace(where=few["exact"].where[:2], counts=few["exact"].counts[:2])
    want = decode_reference(**few)[0]
    return ((out[:2].float() - want).norm() / want.norm()).item()


def _resources() -> Row:
    """Registers and spilled registers of the compiled decode kernel, the largest of its variants."""
    from rolaq.kernels.decode_gluon import decode_item

    kernels = [k for cache in decode_item.device_caches.values() for k in cache[0].values()]
    return {"registers": max(k.n_regs for k in kernels), "spills": max(k.n_spills for k in kernels)}


def _bf16(
    case: Case, q: Tensor, cache: Tensor, tables: list[Tensor], lengths: Tensor, scale: float
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(impl, ms, more) of each BF16 kernel that is installed and supports the case."""
    if case.d == 512:
        try:
            yield "bf16-flashmla", graph_ms(baselines.flashmla(q, cache, tables, lengths, scale)), {}
        except ImportError:
            print("FlashMLA is not installed (package sglang-kernel): not timed", file=sys.stderr)
    if case.queries > 1 or max(case.lengths) > 50 * min(case.lengths):
        return
    try:
        best = min(
            (graph_ms(baselines.sglang_triton(q, cache, tables, lengths, scale, case.d, n), 5), n)
            for n in baselines.SPLITS
            if 64 <= len(case.lengths) * n <= 512
        )
        yield "bf16-triton", best[0], {"splits": best[1]}
    except ImportError:
        print("SGLang is not installed: its Triton kernel is not timed", file=sys.stderr)
