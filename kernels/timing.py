"""Timing on a GPU, and the caches that the timed calls read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.reference import pack_rows
from rolaq.quant.quantizer import encode
from rolaq.quant.spec import QuantizerSpec

POOL = 1 << 20  # tokens of the caches that the timed calls read from
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


def timed(shape: Row, impl: str, ms: float, bytes_: int, rate: float, **more: Any) -> Row:
    """A row of results; `rate` is `copy_rate()`."""
    return {**shape, "impl": impl, "ms": ms, "bytes": bytes_, "fraction_of_copy": bytes_ / ms / rate, **more}
