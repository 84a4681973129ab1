"""`python -m rolaq.eval.speed model=tiny`: what simulating a method costs, against BF16 at the same batch size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from pydantic import Field, field_validator
from torch import Tensor

from rolaq.common.cli import run_hydra
from rolaq.common.config import Config, ModelConfig, resolve
from rolaq.common.files import markdown_table, write_json
from rolaq.common.models import load_model
from rolaq.common.progress import progress
from rolaq.eval.lm import QuantizedLM
from rolaq.eval.methods import Target, build, load_artifacts
from rolaq.eval.passes import Budgets, known_methods
from rolaq.eval.results import Row, stamp
from rolaq.quant.protection import Protection


class SpeedConfig(Config):
    """What `python -m rolaq.eval.speed` takes; see `conf/speed.yaml`.

    A likelihood pass scores ``batch`` sequences of ``tokens``; a generation reads ``prompt`` tokens of each
    and writes ``generate`` more. Each is timed ``repeats`` times after a first one; the median counts.
    """

    model: ModelConfig
    methods: list[str]
    budgets: Budgets = ["0+0", "4+16"]
    batch: int = Field(32, ge=1)
    tokens: int = Field(1024, ge=2)
    prompt: int = Field(512, ge=1)
    generate: int = Field(64, ge=1)
    repeats: int = Field(3, ge=1)
    artifact: str = "auto"
    artifacts: str = "artifacts"
    output: str = "results"

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: list[str]) -> list[str]:
        return known_methods(names)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of ``work``, finished on the device, after one untimed call."""
    times = []
    for _ in range(1 + repeats):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def likelihood(lm: QuantizedLM, ids: Tensor) -> object:
    """Log-probabilities of all positions, as the harness computes them."""
    return torch.log_softmax(lm._model_call(ids), dim=-1)


def generation(lm: QuantizedLM, ids: Tensor, new: int) -> Tensor:
    """Exactly ``new`` greedy tokens after each prompt."""
    total = ids.shape[1] + new
    mask = torch.ones_like(ids)
    return lm._model_generate(
        ids, max_length=total, stop=[], attention_mask=mask, min_new_tokens=new, do_sample=False
    )


def measure(cfg: SpeedConfig) -> Iterator[list[Row]]:
    """The rows so far, after each method and budget: kind of work, time, time relative to BF16's."""
    target = Target.of(cfg.model, *load_model(cfg.model))
    calibrated = load_artifacts(cfg.methods, target, cfg.model, cfg.artifact, cfg.artifacts)
    entries = build(["bf16", *cfg.methods], target, calibrated)
    lm = QuantizedLM(target.model, target.tokenizer, cfg.batch, cfg.model.context)
    torch.manual_seed(0)
    ids = torch.randint(1, target.model.config.vocab_size, (cfg.batch, cfg.tokens), device=lm.device)
    works: dict[str, Callable[[], Any]] = {
        "likelihood": lambda: likelihood(lm, ids),
        "generation": lambda: generation(lm, ids[:, : cfg.prompt], cfg.generate),
    }
    runs = [(e, b) for e in entries for b in (cfg.budgets[:1] if e.method.exact else cfg.budgets)]
    rows: list[Row] = []
    for entry, budget in progress(runs, label="speed, method and budget"):
        lm.use(entry.method, Protection.parse(budget))
        for kind, work in works.items():
            spent = seconds(work, cfg.repeats)
            exact = next((row["seconds"] for row in rows if row["kind"] == kind), spent)
            about = {"model": cfg.model.name, "method": entry.name, "budget": budget, "kind": kind}
            sizes = {"batch": cfg.batch, "tokens": cfg.tokens if kind == "likelihood" else cfg.prompt}
            rows.append({**about, **sizes, "seconds": spent, "relative": spent / exact, **stamp()})
        yield rows


def run(raw: DictConfig) -> None:
    """Measure, print, write ``<output>/<model>/speed/speed.json`` as the rows come."""
    cfg = resolve(raw, SpeedConfig)
    path, rows = Path(cfg.output) / cfg.model.name / "speed" / "speed.json", list[Row]()
    for rows in measure(cfg):
        write_json(path, rows)
    print(markdown_table(rows, ["method", "budget", "kind", "batch", "tokens", "seconds", "relative"]))
    print(f"wrote {path}")


if __name__ == "__main__":
    run_hydra("speed", run)
