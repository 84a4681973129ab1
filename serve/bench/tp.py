"""Tensor parallelism against one GPU: greedy outputs of the small model and of the large shape, random weights."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rolaq.common.files import find
from rolaq.serve.bench.agree import LOGPROBS, Greedy, count, verdict
from rolaq.serve.bench.client import connect
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.measure import figure, prompt
from rolaq.serve.bench.models import random_checkpoint, reduced
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.server import Server, launched
from rolaq.serve.bench.small import SINKS, SLOTS, arguments, prompts, server
from rolaq.serve.bench.speed import settings

BUDGET = "4+16"
NCCL: dict[str, Any] = {"disable_custom_all_reduce": True}  # sums in the same order on every machine


def run(cfg: BenchConfig) -> list[Row]:
    """A row for each model: outputs that changed, of all."""
    lengths = [64 + 29 * n for n in range(cfg.tp.prompts)]
    texts = prompts(cfg, lengths)
    rows = [
        _compare(cfg, cfg.tiny.name, texts, lambda size, log: server(cfg, BUDGET, log, tp_size=size, **NCCL))
    ]
    config = reduced(find(cfg.model.config), cfg.tp.layers, cfg.tp.experts)
    name = f"{cfg.model.name}, {cfg.tp.layers} layers, {cfg.tp.experts} experts"
    model, artifact = random_checkpoint(config, Path(cfg.output) / "model" / "random", cfg.seed)

    def large(size: int, log: Path) -> AbstractContextManager[Server]:
        options = arguments(
            cfg, BUDGET, model_path=str(model), skip_tokenizer_init=True, tp_size=size, **NCCL
        )
        environment = settings(str(artifact), BUDGET, SLOTS, SINKS)
        return launched(options, log, environment, wait_s=cfg.server.start_s)

    texts = [prompt(n, length, config["vocab_size"]) for n, length in enumerate(lengths)]
    return [*rows, _compare(cfg, name, texts, large)]


def _compare(cfg: BenchConfig, name: str, texts: list[list[int]], start: Any) -> Row:
    outputs = []
    for size in (1, cfg.tp.size):
        log = Path(cfg.output) / "logs" / f"tp{size}-{name.split(',')[0]}.log"
        with start(size, log) as running:
            outputs.append(asyncio.run(_greedy(running.url, texts, cfg.tp.new_tokens)))
    found = count([verdict(one, many, cfg.tp.same) for one, many in zip(*outputs, strict=True)])
    about = {
        "impl": "int2",
        "model": name,
        "budget": BUDGET,
        "gpus": cfg.tp.size,
        "ok": found["changed"] == 0,
    }
    return {**about, **figure("tp_changed", found.pop("changed"), "outputs", len(texts), **found)}


async def _greedy(url: str, texts: list[list[int]], tokens: int) -> list[Greedy]:
    """One request after the other, so that no batch makes a difference."""
    async with connect(url) as client:
        return [Greedy.of(await client.generate(ids, tokens, **LOGPROBS)) for ids in texts]
