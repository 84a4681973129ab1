"""Load and faults against a running server: nothing breaks, nothing leaks, outputs stay what they were."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError, one_line
from rolaq.serve.bench import agree
from rolaq.serve.bench.agree import LOGPROBS, Greedy, Verdict
from rolaq.serve.bench.bad import requests
from rolaq.serve.bench.client import Client, connect, gather
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.measure import figure
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.server import Server
from rolaq.serve.bench.small import launcher, prompts, tokens
from rolaq.serve.bench.traffic import Traffic

BUDGET = "4+16"
OUTPUT = 24  # tokens of a probe
PAGE = 64
CONTEXT = 2048  # tokens of the longest requests
PAUSE_S = 3.0  # between two rounds of probes
# prompts below a page never come from the prefix cache, the others may
LENGTHS = (12, 40, 60, 63, 100, 200, 330, 500, 700, 900, 1200, 1500)


def run(cfg: BenchConfig) -> list[Row]:
    """One row for each thing that must hold, and one with what was sent."""
    log = Path(cfg.output) / "logs" / "soak.log"
    small = {"max_total_tokens": cfg.soak.pool_tokens, "schedule_conservativeness": 0.1}
    given = nullcontext(Server(cfg.soak.url, log)) if cfg.soak.url else None
    with given or launcher(cfg, BUDGET, log, small) as running:
        return asyncio.run(soak(cfg, running))


async def soak(cfg: BenchConfig, running: Server) -> list[Row]:
    """References in isolation, then traffic with probes in between, then the counts at rest."""
    context = min(running.get("/server_info").get("context_length") or CONTEXT, CONTEXT)
    async with connect(running.url, cfg.soak.key) as client:
        lengths = list(islice(cycle(LENGTHS), cfg.soak.probes))
        texts = prompts(cfg, lengths, skip=20000)
        isolated = await references(client, texts)
        stop = time.monotonic() + 60 * cfg.soak.minutes
        traffic = Traffic(tokens(cfg, 20000), context, requests(context), stop, cfg.seed)
        clients = [asyncio.create_task(traffic.client(client)) for _ in range(cfg.soak.clients)]
        verdicts, errors = await probe(client, cfg, texts, isolated, stop)
        await asyncio.gather(*clients)
        left = await at_rest(client, context)
    return rows_of(cfg, traffic, verdicts, [*errors, *traffic.wrong], left)


async def references(client: Client, texts: Sequence[list[int]]) -> list[list[Greedy]]:
    """Each probe's outputs in isolation: from an empty cache, and from a prefix that is there already."""
    await client.flush()
    found: list[list[Greedy]] = [[] for _ in texts]
    for _ in range(2):
        for outputs, ids in zip(found, texts, strict=True):
            outputs.append(Greedy.of(await client.generate(ids, OUTPUT, **LOGPROBS)))
    return found


async def probe(
    client: Client,
    cfg: BenchConfig,
    texts: Sequence[list[int]],
    isolated: Sequence[list[Greedy]],
    stop: float,
) -> tuple[list[tuple[Verdict, float]], list[str]]:
    """Send the probes again and again among the traffic; how they compare, and what failed."""
    verdicts, errors = [], []
    while time.monotonic() < stop:
        for ids, known in zip(texts, isolated, strict=True):
            try:
                answer = Greedy.of(await client.generate(ids, OUTPUT, **LOGPROBS))
                verdicts.append(agree.best(known, answer, cfg.soak.same))
            except RolaqError as error:
                errors.append(f"probe of {len(ids)} tokens: {one_line(error, 120)}")
                await asyncio.sleep(1)
        await asyncio.sleep(PAUSE_S)
    return verdicts, errors


async def at_rest(client: Client, context: int) -> dict[str, Any]:
    """After a flush: tokens and requests that the scheduler and the pool still count, and what was retracted."""
    await client.flush(120)
    load = (await client.get("/v1/loads"))["loads"][0]
    packed = (await client.get("/server_info"))["internal_states"][0].get("rolaq", {})
    metrics = str(await client.get("/metrics"))
    retracted = re.findall(r"^sglang:num_retracted_requests_total\S* (\S+)", metrics, re.MULTILINE)
    # all of the pool again: had slots been lost, there would be no room
    length, room = context // 2, int(load["max_total_num_tokens"])
    answers = await gather(client.stream([20 + n] * length, 8) for n in range(room // (length + 2 * PAGE)))
    return {
        "tokens": load["num_used_tokens"] + packed.get("tokens_used", 0), "running": load["num_running_reqs"], "waiting": load["num_waiting_reqs"],
        "retracted": sum(map(float, retracted)), "refilled": len(answers),
        "refused": sum(bool(one.error) for one in answers),
    }  # fmt: skip


def rows_of(
    cfg: BenchConfig, traffic: Traffic, verdicts: Sequence[tuple[Verdict, float]], wrong: Sequence[str], left: dict[str, Any]
) -> list[Row]:  # fmt: skip
    """The rows; what must be zero carries ``ok``."""
    for line in wrong[:10]:
        print(f"soak: {line}", flush=True)
    minutes = f"{cfg.soak.minutes:g} minutes"
    about = {"impl": "int2", "model": cfg.tiny.name, "budget": BUDGET, "mode": minutes}
    judged, clients = agree.count(verdicts), cfg.soak.clients
    changed, lost = (
        judged.pop("changed"),
        left["tokens"] + left["running"] + left["waiting"] + left["refused"],
    )
    sent = {"sent": sum(traffic.sent.values()), **traffic.sent}
    found = [
        figure("soak_failures", len(wrong), "requests", clients, **sent, ok=not wrong),
        figure("soak_changed", changed, "outputs", clients, **judged, ok=changed == 0 and bool(verdicts)),
        figure("soak_leaked", lost, "tokens and requests", clients, refilled=left["refilled"], ok=lost == 0),
        figure("soak_retracted", left["retracted"], "requests", clients, ok=left["retracted"] > 0),
    ]
    return [{**about, **row} for row in found]
