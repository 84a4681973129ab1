"""`python -m rolaq.eval model=tiny suite=quick`: all methods side by side."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rolaq.common.cli import run_hydra
from rolaq.common.config import resolve
from rolaq.common.files import atomic_write
from rolaq.common.models import load_model
from rolaq.common.tracking import Tracker, tracker
from rolaq.eval import benchmark_run, energy, gain_sweep, kappa_sweep, quality, ruler, server_run
from rolaq.eval.config import EvalConfig
from rolaq.eval.methods import Target, build, load_artifacts
from rolaq.eval.plots import draw
from rolaq.eval.results import KEYS, Results
from rolaq.eval.selection import selection_rows
from rolaq.eval.session import Session
from rolaq.eval.tables import sections
from rolaq.eval.task_tables import task_sections
from rolaq.quant.adapters.fused import fused_attention


def start(cfg: EvalConfig, results: Results) -> Session:
    """Load the model and what was calibrated for it; earlier rows of the same inputs stay."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    target = Target.of(cfg.model, *load_model(cfg.model))
    calibrated = load_artifacts(cfg.methods, target, cfg.model, cfg.artifact, cfg.artifacts)
    for kind, found in calibrated.items():
        print(f"{kind}: {found.folder} ({found.artifact.id})")
    return Session(cfg, target, calibrated, results)


def measure(session: Session) -> None:
    """All parts of the suite, the cheap ones first."""
    energy.run(session)
    sweep = session.cfg.suite.gain_sweep is not None and "oscar" in session.calibrated
    best = gain_sweep.run(session) if sweep else None
    session.entries = build(session.cfg.methods, session.target, session.calibrated, best)
    for entry in session.entries:
        session.results.forget(entry.name, entry.seed, entry.id, session.variant(entry))
    for row in selection_rows(session):
        session.results.add("selection", row)
    kappa_sweep.run(session)
    quality.evaluate(session)
    ruler.evaluate(session)
    benchmark_run.evaluate(session)


def publish(cfg: EvalConfig, results: Results, track: Tracker) -> list[Path]:
    """Save the JSON, one Markdown page of tables and the figures; returns what was written."""
    name = cfg.suite.name
    results.save()
    tables = {table: results.rows(table) for table in KEYS}
    page = results.path.with_suffix(".md")
    texts = {**task_sections(tables["tasks"]), **sections(tables)}
    with atomic_write(page) as temporary:
        parts = [
            f"# {cfg.model.name}, suite {name}\n",
            *(f"## {title}\n\n{text}" for title, text in texts.items()),
        ]
        temporary.write_text("\n".join(parts), encoding="utf-8")
    figures = draw(tables, results.meta, results.path.parent / "figures" / name)
    for title, path in figures.items():
        track.figure(title, path)
    for table, rows in tables.items():
        track.table(table, rows)
    for title, text in texts.items():
        if title == "Summary" or title.startswith("Accuracy"):
            print(f"\n{title}\n\n{text}")
    return [results.path, page, *figures.values()]


def simulate(session: Session, track: Tracker) -> None:
    """Everything in Transformers; saved also when it is stopped."""
    # on a GPU the model keeps the kernel it has, so that bf16 is the plain model to the last bit
    kernels = fused_attention() if session.target.model.device.type == "cpu" else nullcontext()
    with kernels:
        for kind, found in session.calibrated.items():
            track.use_artifact(f"{session.target.name}-{kind}", "kv-quantizer", found.folder)
        try:
            measure(session)
        finally:
            session.results.save()


def run(raw: DictConfig) -> None:
    """One evaluation, from its configuration to the summary."""
    began = time.monotonic()
    cfg = resolve(raw, EvalConfig)
    results = Results(Path(cfg.output) / cfg.model.name / f"{cfg.suite.name}.json")
    session = start(cfg, results) if cfg.backend == "simulated" else None
    plain: dict[str, Any] = OmegaConf.to_container(raw, resolve=True)  # type: ignore[assignment]
    results.meta["config"] = plain
    with tracker(cfg.tracking, "eval", plain) as track:
        if session is None:
            server_run.run(cfg, results)
        else:
            simulate(session, track)
        written = publish(cfg, results, track)
    print(f"wrote {', '.join(map(str, written[:2]))} and {len(written) - 2} figures")
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    run_hydra("eval", run)
