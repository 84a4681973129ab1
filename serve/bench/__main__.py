"""`python -m rolaq.serve.bench run=[capacity,decode,ttft]`: serving measured against BF16, and proven."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from rolaq.common.cli import run_hydra
from rolaq.common.config import resolve
from rolaq.common.errors import RolaqError, lookup
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.figures import draw
from rolaq.serve.bench.results import Row, ratio_table, read_rows, save, stamp, table

SPEED = ("capacity", "decode", "ttft")
# part: its module, and whether it starts servers (and so needs SGLang)
OTHERS = {"parity": True, "compare": False, "tp": True, "soak": True, "conversation": True}


def check(cfg: BenchConfig) -> None:
    """Raise `RolaqError` for an unknown part or implementation, or where SGLang is needed and missing."""
    parts = {**dict.fromkeys(SPEED, True), **OTHERS}
    needs = [lookup("part", name, parts) for name in cfg.run]
    for name in cfg.use:
        lookup("implementation", name, cfg.implementations)
    if any(needs) and cfg.soak.url is None and importlib.util.find_spec("sglang") is None:
        raise RolaqError("SGLang is not installed: use `make bench`, or pip install 'rolaq[serve]'")


def measure(cfg: BenchConfig) -> tuple[list[Row], list[str]]:
    """The rows of all parts, in the order in which they are named, and what went wrong in those that failed."""
    speed = [name for name in cfg.run if name in SPEED]
    calls = [("speed", {"parts": speed})] if speed else []
    calls += [(name, {}) for name in dict.fromkeys(cfg.run) if name in OTHERS]
    rows: list[Row] = []
    failed: list[str] = []
    for name, more in calls:
        try:
            rows += importlib.import_module(f"rolaq.serve.bench.{name}").run(cfg, **more)
        except RolaqError as error:  # the results of the other parts are not lost
            failed.append(f"{name}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
    return rows, failed


def run(raw: DictConfig) -> None:
    """Measure, write the rows, draw, and print the table."""
    cfg = resolve(raw, BenchConfig)
    # a terminated bench ends its servers, as an interrupted one does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check(cfg)
    rows, failed = measure(cfg)
    rows = stamp(rows)
    written = publish(cfg, rows) if rows else []
    if rows:
        print(table(rows), ratio_table(rows), "wrote " + ", ".join(map(str, written)), sep="\n")
    failed += [f"did not hold: {describe(row)}" for row in rows if row.get("ok") is False]
    if failed:
        raise RolaqError("; ".join(failed))


def publish(cfg: BenchConfig, rows: list[Row]) -> list[Path]:
    """Merge the rows into the results, and where asked into the recorded ones; draw all there are."""
    path = Path(cfg.output) / "serve.json"
    written = [save(path, rows)]
    if cfg.record:
        written.append(save(Path("docs") / "results" / "serve.json", rows))
    return written + draw(read_rows(path), path.parent)


def describe(row: Row) -> str:
    """A row in a few words."""
    names = (row["figure"], row.get("budget"), row.get("mode"))
    return f"{' '.join(filter(None, names))} = {row['value']:.4g} {row['unit']}"


if __name__ == "__main__":
    run_hydra("bench", run)
