"""Time the kernels on this GPU against BF16 ones in the same run: `python -m rolaq.kernels.bench`.

Writes rows for `docs/results/kernels.json` and prints a table. Medians of CUDA-graph replays; several
page tables take turns, so that a cache smaller than the L2 is not timed out of it more than need be.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError, main
from rolaq.common.files import commit, markdown_table, write_json
from rolaq.kernels import baselines
from rolaq.kernels.cases import SPEED, WRITE_TOKENS, Case
from rolaq.kernels.decode import column_blocks, decode, make_workspace
from rolaq.kernels.exact import Exact
from rolaq.kernels.gather import gather
from rolaq.kernels.plan import make_plan
from rolaq.kernels.reference import decode_reference, pack_rows
from rolaq.kernels.write import split_rotation, write
from rolaq.quant.quantizer import encode
from rolaq.quant.spec import QuantizerSpec, bf16_bytes_per_token

POOL = 1 << 20  # tokens of the caches that the timed calls read from
COLUMNS = {
    "kernel": "kernel", "case": "case", "impl": "impl", "ms": "ms", "fraction_of_copy": "of copy",
    "rel_err": "error", "registers": "registers", "spills": "spills",
}  # fmt: skip
Row = dict[str, Any]


def graph_ms(calls: Sequence[Callable[[], Any]], replays: int = 30) -> float:
    """Median time of one call in ms, from replays of a graph that makes each call in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = -(-8 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / (rounds * len(calls)))
    return median(times[3:])


def copy_rate() -> float:
    """Bytes read and written per ms by a device-wide elementwise kernel."""
    x = torch.randint(1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / graph_ms([lambda: torch.neg(x, out=y)], 10)


def packed_pool(d: int, d_r: int) -> Tensor:
    """POOL packed rows of random latents."""
    rows = torch.empty(POOL, QuantizerSpec().bytes_per_token(d, d_r), dtype=torch.uint8, device="cuda")
    for part in rows.split(1 << 16):
        z = torch.randn(len(part), d, device="cuda") * 1.3 + 0.1
        part.copy_(pack_rows(encode(z, 0.98, 1.1), torch.randn(len(part), d_r, device="cuda").bfloat16()))
    return rows


def page_tables(lengths: Sequence[int], page: int = 64) -> list[Tensor]:
    """Up to four page tables over distinct pages of the pool, in random order."""
    pages = [-(-n // page) for n in lengths]
    count = min(4, POOL // page // sum(pages))
    order = torch.randperm(POOL // page, device="cuda").int()
    tables = torch.zeros(count, len(lengths), max(pages), dtype=torch.int32, device="cuda")
    for i in range(count):
        for b, part in enumerate(order[i * sum(pages) :][: sum(pages)].split(pages)):
            tables[i, b, : len(part)] = part
    return list(tables)


def bench_decode(name: str, case: Case, rows: Tensor, bf16: Tensor, rate: float, rest: bool) -> list[Row]:
    """Rows of one case: ours, and with `rest` the BF16 kernels that are installed."""
    batch, d, d_r = len(case.lengths), case.d, case.d_r
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    tables = page_tables(case.lengths)
    q = torch.randn(batch, case.queries, case.heads, d + d_r, device="cuda").bfloat16()
    scale = (d / 4 + d_r) ** -0.5
    exact = _protected(case) if case.sink + case.recent else None
    plan = make_plan(
        lengths, exact and exact.counts, sink=case.sink, recent=case.recent,
        blocks=column_blocks(case.queries, case.heads),
    )  # fmt: skip
    workspace = make_workspace(plan, case.queries, case.heads, d)
    out = torch.empty(batch, case.queries, case.heads, d, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(batch, case.queries, case.heads, device="cuda")
    fixed = {
        "q": q[..., :d], "q_rope": q[..., d:], "rows": rows, "lengths": lengths, "page_size": 64, "scale": scale,
        "exact": exact,
    }  # fmt: skip

    def ours(table: Tensor) -> Callable[[], Any]:
        return lambda: decode(**fixed, page_table=table, plan=plan, workspace=workspace, out=out, lse=lse)

    tokens = sum(case.lengths)
    shape = {
        "kernel": "decode", "case": name, "batch": batch, "tokens": max(case.lengths), "heads": case.heads, "d": d,
    }  # fmt: skip

    def row(impl: str, ms: float, bytes_: int, **more: Any) -> Row:
        return {
            **shape,
            "impl": impl,
            "ms": ms,
            "bytes": bytes_,
            "fraction_of_copy": bytes_ / ms / rate,
            **more,
        }

    ms = graph_ms([ours(table) for table in tables])
    found = [
        row("int2", ms, tokens * rows.shape[1], rel_err=_error(case, fixed, tables[-1], out), **_resources())
    ]
    if rest and exact is None:
        found += [
            row(impl, ms, tokens * bf16_bytes_per_token(d, d_r), **more)
            for impl, ms, more in _bf16(case, q, bf16, tables, lengths, scale)
        ]
    return found


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


def _bf16(case: Case, q: Tensor, cache: Tensor, tables: list[Tensor], lengths: Tensor, scale: float):
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


def bench_write(tokens: int, rows: Tensor, rate: float) -> list[Row]:
    """Write and gather at d = 512, beside the rotation alone as torch's matrix products."""
    d, d_r = 512, 64
    c, rope = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (d, d_r))
    rotation = torch.linalg.qr(torch.randn(d, d, device="cuda"))[0].contiguous()
    parts, slots = split_rotation(rotation), torch.randperm(POOL, device="cuda")[:tokens].int()
    wide, half, out = c.float(), rotation.bfloat16(), torch.empty(tokens, d, device="cuda")
    short = torch.empty(tokens, d, device="cuda", dtype=torch.bfloat16)
    shape = {"case": f"{tokens} tokens", "batch": 1, "tokens": tokens, "heads": None, "d": d}

    def row(kernel: str, impl: str, call: Callable[[], Any], bytes_: int) -> Row:
        ms = graph_ms([call])
        return {
            "kernel": kernel,
            **shape,
            "impl": impl,
            "ms": ms,
            "bytes": bytes_,
            "fraction_of_copy": bytes_ / ms / rate,
            "rel_err": None,
        }

    stored = tokens * rows.shape[1]
    found = [
        row(
            "write",
            "int2",
            lambda: write(c, rope, parts, slots, rows, threshold=0.93, gain=1.09),
            stored + c.nbytes + rope.nbytes + parts.nbytes,
        ),
        row(
            "write",
            "rotation-fp32",
            lambda: torch.mm(wide, rotation, out=out),
            wide.nbytes + out.nbytes + rotation.nbytes,
        ),
        row(
            "write",
            "rotation-bf16",
            lambda: torch.mm(c, half, out=short),
            c.nbytes + short.nbytes + half.nbytes,
        ),
        row(
            "gather",
            "int2",
            lambda: gather(rows, slots, d, d_r, out=short, rope_out=rope),
            stored + short.nbytes + rope.nbytes,
        ),
        row(
            "gather",
            "int2-unrotated",
            lambda: gather(rows, slots, d, d_r, rotation=half, out=short, rope_out=rope),
            stored + short.nbytes + rope.nbytes,
        ),
    ]
    torch.backends.cuda.matmul.allow_tf32 = True
    found.insert(
        2,
        row(
            "write",
            "rotation-tf32",
            lambda: torch.mm(wide, rotation, out=out),
            wide.nbytes + out.nbytes + rotation.nbytes,
        ),
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


@main
def run(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m rolaq.kernels.bench", description=__doc__)
    parser.add_argument(
        "--out", default="results/kernels.json", help="where the rows go (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-bf16", action="store_true", help="leave the BF16 kernels out")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise RolaqError("the bench needs a CUDA GPU; there is none here")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a device copy moves {rate / 1e6:.0f} GB/s")
    found: list[Row] = []
    for d, d_r in ((512, 64), (256, 32)):
        cases = {name: case for name, case in SPEED.items() if case.d == d and options.only in name}
        if not cases:
            continue
        rows, bf16 = packed_pool(d, d_r), baselines.bf16_cache(POOL, d, d_r)
        for name, case in cases.items():
            found += bench_decode(name, case, rows, bf16, rate, not options.no_bf16)
            print(
                *(f"{name}: {row['impl']} {row['ms']:.4f} ms" for row in found if row["case"] == name),
                sep="\n",
                flush=True,
            )
        if d == 512:
            for tokens in (*WRITE_TOKENS, 1 << 17):
                if options.only in f"{tokens} tokens":
                    found += bench_write(tokens, rows, rate)
    stamp = {
        "commit": commit(), "gpu": torch.cuda.get_device_name(), "copy_gb_s": rate / 1e6,
        "command": "python -m rolaq.kernels.bench", "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    write_json(options.out, [{**row, **stamp} for row in found])
    print(markdown_table(found, COLUMNS), options.out, sep="\n")


if __name__ == "__main__":
    run()
