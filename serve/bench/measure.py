"""The measurements that one running server goes through."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.common.files import read_json
from rolaq.quant.protection import Protection
from rolaq.serve.bench.client import Client, gather
from rolaq.serve.bench.config import BenchConfig, Implementation, TtftConfig
from rolaq.serve.bench.probe import SKIP
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.server import Server
from rolaq.serve.bench.stats import Timeline, first_tokens, over_interval, throughput
from rolaq.serve.sizing import Sizing

WITHOUT: dict[str, Any] = {"prefill": "no attention"}  # said in the rows of long contexts


def figure(
    name: str, value: float, unit: str, requests: int | None = None, inputs: int | None = None,
    outputs: int | None = None, **more: Any,
) -> Row:  # fmt: skip
    """One measured value."""
    shape = {"requests": requests, "input_tokens": inputs, "output_tokens": outputs}
    return {"figure": name, **shape, "value": value, "unit": unit, **more}


def capacity(server: Server, cfg: BenchConfig, implementation: Implementation) -> list[Row]:
    """Tokens that fit, as the server says; for the packed cache also what 0+0 has room for in the same bytes."""
    tokens = server.state["memory_usage"]["token_capacity"]
    rows = [figure("capacity", tokens, "tokens")]
    if implementation.budget not in (None, "0+0"):
        mine, bare = (sizing(cfg, budget) for budget in (implementation.budget, "0+0"))
        rows.append(
            figure("capacity", bare.tokens(mine.bytes(tokens)), "tokens", budget="0+0", computed=True)
        )
    return rows


def sizing(cfg: BenchConfig, budget: str | None) -> Sizing:
    """Bytes of the packed pool of the measured model."""
    shape, spec = read_json(cfg.model.config_file), Protection.parse(budget or "0+0")
    return Sizing(
        layers=shape["num_hidden_layers"], d=shape["kv_lora_rank"], d_r=shape["qk_rope_head_dim"],
        slots=cfg.server.slots, sink=spec.sink, recent=spec.recent, sink_entries=cfg.server.sink_entries,
    )  # fmt: skip


async def warm_up(client: Client) -> None:
    """A few tokens of a few requests, so that nothing is compiled or loaded within a measurement."""
    await gather(client.stream(prompt(100 + n, 300), 12, f"{SKIP}warm-{n}") for n in range(4))
    await gather(client.stream(prompt(200 + n, 300), 12) for n in range(4))
    await client.flush()


def prompt(seed: int, tokens: int, vocabulary: int = 4000) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(10, vocabulary), k=tokens)


async def decode(client: Client, cfg: BenchConfig) -> list[Row]:
    """Throughput at each context, and over the interval of output positions.

    Each prompt continues the one before it, so that the prefix cache leaves only the difference to prefill.
    """
    measured, found = cfg.decode, {}
    prompts = [prompt(cfg.seed * 1000 + n, measured.inputs[-1]) for n in range(measured.requests)]
    rows = []
    for length in measured.inputs:
        names = [f"{SKIP}{length}-{n}" for n in range(measured.requests)]
        lines: list[Timeline] = await gather(
            client.stream(ids[:length], measured.tokens, name)
            for ids, name in zip(prompts, names, strict=True)
        )
        refused(lines)
        found[length] = throughput(lines, measured.drop)
        shape = (measured.requests, length, measured.tokens)
        rows.append(figure("decode", found[length], "tok/s", *shape, **WITHOUT))
    begin, end = measured.interval
    if begin >= min(found) and end <= max(found):
        shape, points = (measured.requests, min(found), end), sum(begin <= n <= end for n in found)
        value = over_interval(found, begin, end)
        rows.append(
            figure("decode_interval", value, "tok/s", *shape, output_from=begin, points=points, **WITHOUT)
        )
    return rows


async def ttft(client: Client, cfg: BenchConfig, limit: float) -> list[Row]:
    """P50 and P99 of the time to the first token for each concurrency, from one burst with a real prefill.

    The burst ends when every request has its first token, or is cut off after ``limit`` seconds.
    """
    burst = cfg.ttft
    prompts = [prompt(cfg.seed * 1000 + 5000 + n, burst.input_tokens) for n in range(max(burst.requests))]
    lines = [Timeline() for _ in prompts]
    tasks = [
        asyncio.create_task(client.stream(ids, burst.output_tokens, f"burst-{n}", line))
        for n, (ids, line) in enumerate(zip(prompts, lines, strict=True))
    ]
    began = time.perf_counter()
    while (
        any(line.first is None and not line.error for line in lines) and time.perf_counter() - began < limit
    ):
        await asyncio.sleep(0.1)
    cut = time.perf_counter() - began
    refused(lines)
    times = [line.first for line in lines]
    await client.abort_all()
    await asyncio.wait(tasks, timeout=60)
    return [row for n in burst.requests for row in _levels(burst, times, n, cut)]


def _levels(burst: TtftConfig, times: Sequence[float | None], requests: int, cut: float) -> list[Row]:
    rows = []
    for q in (50, 99):
        bound = first_tokens(times, requests, q, cut)
        more: dict[str, Any] = {"bound": "at least"} if bound.at_least else {}
        shape = (requests, burst.input_tokens, burst.output_tokens)
        rows.append(figure(f"ttft_p{q}", bound.value, "s", *shape, burst=max(burst.requests), **more))
    return rows


def refused(lines: Sequence[Timeline]) -> None:
    """Raise `RolaqError` with the first error among the answers."""
    for line in lines:
        if line.error:
            raise RolaqError(f"the server refused a request: {line.error}")
