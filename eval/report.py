"""`python -m rolaq.eval.report model=tiny`: one HTML page, and the tables of README and docs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rolaq.common.cli import run_hydra
from rolaq.common.config import Config, ModelConfig, TrackingConfig, resolve
from rolaq.common.errors import RolaqError, lookup
from rolaq.common.files import atomic_write, find, read_json, write_json
from rolaq.common.tracking import Tracker, tracker
from rolaq.eval import page
from rolaq.eval.ablations import read_runs
from rolaq.eval.material import RECORDED, gather, of_model, profile_rows, recorded
from rolaq.eval.pages import refresh
from rolaq.eval.results import KEYS, Results, Row, merge
from rolaq.quant.artifact import CONFIG_NAME


class ReportConfig(Config):
    """What `python -m rolaq.eval.report` takes; see `conf/report.yaml`.

    ``record`` copies the rows of the only suite there is (true), or of the one it names; ``runs`` stands for
    the calibration runs. ``page`` is a further place for the page.
    """

    model: ModelConfig
    record: bool | str = False
    output: str = "results"
    artifacts: str = "artifacts"
    docs: str = "docs"
    pages: list[str] = ["README.md", "docs"]
    page: str | None = None
    tracking: TrackingConfig = TrackingConfig(mode="none")


def suites(cfg: ReportConfig) -> list[Results]:
    """The results of the model, one per suite."""
    folder = Path(cfg.output) / cfg.model.name
    return [Results(path) for path in sorted(folder.glob("*.json"))]


def record(results: Sequence[Results], cfg: ReportConfig, folder: Path) -> list[Path]:
    """Merge the rows of one suite into ``<folder>/<table>.json``; rows with the same key are replaced.

    With ``record=runs`` those of the calibration runs below ``artifacts/<model>/runs``.

    Raises:
        RolaqError: no such suite, or it is not clear which one is meant.
    """
    if not cfg.record:
        return []
    if cfg.record == "runs":
        runs, layers = read_runs(cfg.artifacts, cfg.model.name)
        return _merged({"ablations": runs, "thresholds": layers}, folder)
    found = {item.path.stem: item for item in results}
    if cfg.record is True and len(found) != 1:
        names = ", ".join(found) or "none, run `make eval` first"
        raise RolaqError(f"record=true needs a single suite, there are {names}: give record=<suite>")
    chosen = (
        next(iter(found.values()))
        if cfg.record is True
        else lookup("suite in the results", cfg.record, found)
    )
    tables = {table: chosen.rows(table) for table in KEYS}
    profile = chosen.meta.get("energy") if tables["energy"] else None
    tables["energy_profile"] = profile_rows(cfg.model.name, profile) if profile else []
    return _merged(tables, folder)


def _merged(tables: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    written = []
    for table, rows in tables.items():
        path = folder / f"{table}.json"
        if rows:
            written.append(write_json(path, merge(table, read_json(path) if path.exists() else [], rows)))
    return written


def refresh_pages(pages: Sequence[str], folder: Path) -> list[Path]:
    """Refresh the marked tables of Markdown files and of those in folders; returns what changed."""
    tables = recorded(folder)
    files = [
        path
        for name in pages
        for path in ([Path(name)] if name.endswith(".md") else Path(name).rglob("*.md"))
    ]
    return [path for path in files if path.is_file() and refresh(path, tables)]


def readings(path: Path) -> dict[str, str]:
    """What a Markdown page says between a heading and each table marked below it, by the table's name."""
    if not path.is_file():
        return {}
    found = re.findall(
        r"^## [^\n]*\n\n(.*?)<!-- results:start ([\w-]+) -->", path.read_text("utf-8"), re.DOTALL | re.M
    )
    return {name: text.split("\n## ")[-1].strip() for text, name in found}


def build(cfg: ReportConfig, results: Sequence[Results]) -> tuple[str, dict[str, Path]]:
    """The page, and its figures by caption."""
    name, docs = cfg.model.name, Path(cfg.docs) / "results"
    material = gather(name, results, cfg.artifacts, docs)
    said = readings(Path(cfg.docs) / "experiments.md") if name == "tiny" else {}
    return page.build(material, artifact_of(cfg), said, Path(cfg.output) / name / "figures")


def artifact_of(cfg: ReportConfig) -> Path:
    """The model's RoLaQ artifact: its own, or else the one that ships with it."""
    own = Path(cfg.artifacts) / cfg.model.name / "rolaq"
    shipped = Path(find(cfg.model.artifact)) / "rolaq" if cfg.model.artifact else own
    return own if (own / CONFIG_NAME).is_file() else shipped


def run(raw: DictConfig) -> None:
    """Record if asked to, write the page, refresh the tables."""
    cfg = resolve(raw, ReportConfig)
    results, folder = suites(cfg), Path(cfg.docs) / "results"
    name = cfg.model.name
    measured = [rows for rows in of_model(recorded(folder), name).values() if rows]
    if not results and not measured and not read_runs(cfg.artifacts, name)[0]:
        raise RolaqError(f"no results of {name} in {cfg.output}: run `make eval MODEL={name}` first")
    written = record(results, cfg, folder)
    text, figures = build(cfg, results)
    plain: dict[str, Any] = OmegaConf.to_container(raw, resolve=True)  # type: ignore[assignment]
    for path in [Path(cfg.output) / name / "report.html", *([Path(cfg.page)] if cfg.page else [])]:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        written.append(path)
    with tracker(cfg.tracking, "report", plain) as track:
        publish(cfg, results, figures, track)
    for path in [*written, *refresh_pages(cfg.pages, folder)]:
        print(f"wrote {path}")


def publish(
    cfg: ReportConfig, results: Sequence[Results], figures: Mapping[str, Path], track: Tracker
) -> None:
    """The same tables and figures for Weights & Biases, where it is on."""
    material = gather(cfg.model.name, results, cfg.artifacts, Path(cfg.docs) / "results")
    for table in RECORDED:
        if rows := material.rows(table):
            track.table(table, rows)
    for title, path in figures.items():
        track.figure(title, path)


if __name__ == "__main__":
    run_hydra("report", run)
