"""Servers of the small model with real weights, and prompts of natural text for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.files import find
from rolaq.common.models import load_tokenizer
from rolaq.common.text import read_documents
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.probe import Probe
from rolaq.serve.bench.server import Server, flags, free_port, launched, started
from rolaq.serve.bench.speed import settings

SLOTS, SINKS = 64, 256
MEMORY = 0.6  # a bound: the pools are small, and several such servers share a GPU
BATCHES = [1, 2, 4, 8, 16, 32, 64]
STOCK = "bf16-triton"


def arguments(cfg: BenchConfig, budget: str | None, **more: Any) -> dict[str, Any]:
    """SGLang's arguments for the small model: its own cache, or the packed one at `budget`."""
    name = "int2" if budget else STOCK
    common = {key: value for key, value in cfg.server.args.items() if key != "stream_interval"}
    return {
        "model_path": find(cfg.tiny.path), "dtype": "bfloat16", "mem_fraction_static": MEMORY,
        "max_running_requests": SLOTS, "max_total_tokens": 131072, "cuda_graph_bs_decode": BATCHES,
        **common, **cfg.implementations[name].args, **cfg.tiny.args, **more,
    }  # fmt: skip


def server(
    cfg: BenchConfig, budget: str | None, log: Path, probe: Probe | None = None, **more: Any
) -> AbstractContextManager[Server]:
    """A server of the small model; ``more`` are further arguments of SGLang."""
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if budget:
        environment |= settings(
            find(cfg.tiny.artifact), budget, more.get("max_running_requests", SLOTS), SINKS
        )
    return launched(arguments(cfg, budget, **more), log, environment, probe, cfg.server.start_s)


def launcher(
    cfg: BenchConfig, budget: str, log: Path, options: dict[str, Any]
) -> AbstractContextManager[Server]:
    """The small model served as users do it, by `python -m rolaq.serve`, after its own proof of the start.

    ``options`` are further arguments of SGLang.
    """
    port = free_port()
    words = flags({**cfg.server.args, "cuda_graph_bs_decode": BATCHES, **cfg.tiny.args, **options})
    overrides = {
        "model": cfg.tiny.name, "artifact": find(cfg.tiny.artifact), "budget": budget, "server.port": port,
        "server.slots": SLOTS, "server.sink_entries": SINKS, "server.memory_fraction": MEMORY,
        "server.chunked_prefill": 512, "server.args": f"[{','.join(words)}]",
    }  # fmt: skip
    command = [sys.executable, "-m", "rolaq.serve", *(f"{key}={value}" for key, value in overrides.items())]
    return started(command, log, f"http://127.0.0.1:{port}", None, cfg.server.start_s, "ready after")


def tokens(cfg: BenchConfig, count: int) -> list[int]:
    """``count`` tokens of the text, its documents one after the other, from the start again where it ends."""
    tokenizer = load_tokenizer(ModelConfig(name=cfg.tiny.name, path=cfg.tiny.path))
    found: list[int] = []
    for document in read_documents(cfg.tiny.text):
        found += tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(found) >= count:
            break
    if not found:
        raise RolaqError(f"no tokens in {', '.join(cfg.tiny.text)}: set tiny.text")
    return list(islice((token for _ in range(1 + count // len(found)) for token in found), count))


def prompts(cfg: BenchConfig, lengths: Sequence[int], skip: int = 0) -> list[list[int]]:
    """A stretch of text of each length, none of which overlap; ``skip`` tokens of the text are left out first."""
    text = tokens(cfg, skip + sum(lengths))
    found, at = [], skip
    for length in lengths:
        found.append(text[at : at + length])
        at += length
    return found
