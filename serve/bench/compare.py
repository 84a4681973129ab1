"""Served logits against the `serving` simulation in Transformers, chunk by chunk as they were served.

Runs in an environment whose Transformers caches latents (5.17 or later), which SGLang's own need not be.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.files import find, read_json
from rolaq.common.models import load_model
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.hooks import CACHE_NAMES
from rolaq.quant.artifact import Artifact
from rolaq.quant.protection import Protection
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.measure import figure
from rolaq.serve.bench.parity import Job, cached_tokens, index_of, read_jobs
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.stats import percentile

Span = tuple[int, int]


@dataclass
class Served:
    """One request: its tokens (prompt and output), and the row of logits of each forward, by its span."""

    mode: str
    tokens: list[int]
    prompt: int
    rows: dict[Span, int] = field(default_factory=dict)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Its forwards in order: chunks of the prompt, then one token at a time.

        Raises:
            RolaqError: they do not follow each other up to the last token but one.
        """
        # a forward that overlaps the end of the request computes a token too many
        found = sorted(span for span in self.rows if span[1] < len(self.tokens))
        broken = [b for a, b in pairwise(found) if a[1] != b[0]]
        if not found or broken or found[-1][1] != len(self.tokens) - 1:
            raise RolaqError(
                f"the logits of a {self.mode} request are not complete: {found[:3]} … {found[-1:]}"
            )
        return tuple(found)


def read_served(folder: Path, job: Job) -> tuple[list[Served], Tensor]:
    """A job's requests, and its logits `[rows, vocabulary]` fp32."""
    found = {
        answer["rid"]: Served(answer["mode"], answer["prompt"] + answer["output"], len(answer["prompt"]))
        for answer in read_json(folder / f"{job.name}.json")
    }
    path = folder / f"{job.name}.logits.0"
    lines = index_of(path)
    for line in lines:
        if line["rid"] in found:
            found[line["rid"]].rows[(line["start"], line["end"])] = line["row"]
    width = lines[0]["width"] if lines else 1
    return list(found.values()), torch.from_numpy(np.fromfile(path, np.float32).reshape(-1, width))


def groups(served: Sequence[Served]) -> Iterator[list[Served]]:
    """Requests that were computed in the same steps, which can be simulated as a batch."""
    found: dict[Any, list[Served]] = defaultdict(list)
    for item in served:
        found[(item.mode, item.prompt, item.spans)].append(item)
    yield from found.values()


def settle(cache: Any) -> None:
    """Quantize what is still in a cache's recent window: another request finds a prefix without its window."""
    for layer in cache.layers:
        if (left := layer.get_seq_length() - layer.written) > 0:
            total, session = layer.get_seq_length(), layer.session
            stored = session.stored(layer.keys[:, 0, -left:], layer.index, layer.written, total)
            layer.keys = torch.cat((layer.keys[:, :, :-left], stored[:, None]), dim=2)
            layer.written, layer._last = total, None


def simulate(model: Any, group: Sequence[Served]) -> Iterator[tuple[Span, Tensor]]:
    """Each forward's span and logits `[B, vocabulary]` at its last token, inside `attach` or without it."""
    from transformers.cache_utils import DynamicCache

    ids = torch.tensor([item.tokens for item in group], device=model.device)
    cache, spans = DynamicCache(config=model.config), group[0].spans
    given = {cache_name(model): cache, "use_cache": True}
    with torch.no_grad():
        if cached := spans[0][0]:
            model(ids[:, :cached], **given)
            settle(cache)
        for begin, end in spans:
            yield (begin, end), model(ids[:, begin:end], **given).logits[:, -1].float()


def cache_name(model: Any) -> str:
    """What this Transformers calls the cache that a forward is given."""
    return next(name for name in CACHE_NAMES if name in inspect.signature(type(model).forward).parameters)


@dataclass
class Divergence:
    """KL of the served from the simulated predictions, position by position, and whether the best token agrees."""

    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def add(self, simulated: Tensor, served: Tensor) -> None:
        """Logits `[B, vocabulary]` of both, fp32."""
        p, q = simulated.double().log_softmax(-1), served.double().log_softmax(-1)
        self.kl += (p.exp() * (p - q)).sum(-1).tolist()
        self.agree += (p.argmax(-1) == q.argmax(-1)).tolist()


def divergences(model: Any, served: Sequence[Served], logits: Tensor) -> dict[str, Divergence]:
    """By way to prefill."""
    found: dict[str, Divergence] = defaultdict(Divergence)
    for group in groups(served):
        for span, simulated in simulate(model, group):
            rows = logits[[item.rows[span] for item in group]].to(simulated.device)
            found[group[0].mode].add(simulated, rows)
    return found


def run(cfg: BenchConfig) -> list[Row]:
    """The KL rows of everything that `parity` served."""
    folder = Path(cfg.parity.folder)
    model, _ = load_model(ModelConfig(name=cfg.tiny.name, path=cfg.tiny.path))
    method = Artifact.load(find(cfg.tiny.artifact)).method().to(model.device)
    rows = []
    for job in read_jobs(folder):
        served, logits = read_served(folder, job)
        reading: AbstractContextManager[None] = nullcontext()
        if job.budget:
            reading = attach(model, method, Protection.parse(job.budget, "serving"))
        with reading:
            found = divergences(model, served, logits)
        rows += [row_of(cfg, job, mode, served, result) for mode, result in found.items()]
    return rows


def row_of(cfg: BenchConfig, job: Job, mode: str, served: Sequence[Served], found: Divergence) -> Row:
    """Mean KL and agreement; not ok above the bound, or where the prefix cache was not hit."""
    average = mean(found.kl)
    mine = [item for item in served if item.mode == mode]
    hits = sum(item.spans[0][0] == cached_tokens(item.prompt) for item in mine) if mode == "prefix" else None
    more = {
        "max": max(found.kl), "p99": percentile(found.kl, 99), "agreement": mean(found.agree), "positions": len(found.kl),
        "hits": hits, "ok": average <= cfg.parity.kl and hits in (None, len(mine)),
    }  # fmt: skip
    impl = "int2" if job.budget else "bf16-triton"
    about = {"impl": impl, "model": cfg.tiny.name, "budget": job.budget, "mode": mode}
    return {**about, **figure("parity_kl", average, "nats", len(mine)), **more}
