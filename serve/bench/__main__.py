"""`python -m rolaq.serve.bench run=[capacity,decode,ttft]`: serving measured against BF16, and proven."""

from __future__ import annotations

import importlib
import importlib.util
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


def measure(cfg: BenchConfig) -> list[Row]:
    """The rows of all parts, in the order in which they are named."""
    parts = {**dict.fromkeys(SPEED, True), **OTHERS}
    needs = [lookup("part", name, parts) for name in cfg.run]
    if any(needs) and cfg.soak.url is None and importlib.util.find_spec("sglang") is None:
        raise RolaqError("SGLang is not installed: make setup EXTRAS=dev,eval,serve")
    rows: list[Row] = []
    speed = [name for name in cfg.run if name in SPEED]
    if speed:
        from rolaq.serve.bench.speed import Speed

        rows += Speed(cfg, speed).run()
    for name in cfg.run:
        if name not in SPEED:
            rows += importlib.import_module(f"rolaq.serve.bench.{name}").run(cfg)
    return rows


def run(raw: DictConfig) -> None:
    """Measure, write the rows, draw, and print the table."""
    cfg = resolve(raw, BenchConfig)
    for name in cfg.use:
        lookup("implementation", name, cfg.implementations)
    rows = stamp(measure(cfg))
    written = publish(cfg, rows)
    print(table(rows), ratio_table(rows), sep="\n")
    print("wrote", ", ".join(map(str, written)) or "nothing")
    if failed := [row for row in rows if row.get("ok") is False]:
        raise RolaqError("did not hold: " + "; ".join(map(describe, failed)))


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
