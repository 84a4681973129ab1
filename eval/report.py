"""`python -m rolaq.eval.report model=tiny`: one HTML page, and the tables of README and docs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from rolaq.common.cli import run_hydra
from rolaq.common.config import Config, ModelConfig, resolve
from rolaq.common.errors import RolaqError, lookup
from rolaq.common.files import atomic_write, markdown_table, read_json, write_json
from rolaq.eval import html
from rolaq.eval.pages import of_model, recorded, refresh
from rolaq.eval.plots import draw
from rolaq.eval.results import KEYS, Results, merge
from rolaq.eval.tables import sections
from rolaq.quant.artifact import CONFIG_NAME


class ReportConfig(Config):
    """What `python -m rolaq.eval.report` takes; see `conf/report.yaml`.

    ``record`` copies the rows of the only suite there is (true), or of the one it names.
    """

    model: ModelConfig
    record: bool | str = False
    output: str = "results"
    artifacts: str = "artifacts"
    docs: str = "docs"
    pages: list[str] = ["README.md", "docs"]


def suites(cfg: ReportConfig) -> list[Results]:
    """The results of the model, one per suite."""
    folder = Path(cfg.output) / cfg.model.name
    return [Results(path) for path in sorted(folder.glob("*.json"))]


def record(results: Sequence[Results], suite: bool | str, folder: Path) -> list[Path]:
    """Merge the rows of one suite into ``<folder>/<table>.json``; rows with the same key are replaced.

    Raises:
        RolaqError: no such suite, or it is not clear which one is meant.
    """
    if not suite:
        return []
    found = {item.path.stem: item for item in results}
    if suite is True and len(found) != 1:
        names = ", ".join(found) or "none, run `make eval` first"
        raise RolaqError(f"record=true needs a single suite, there are {names}: give record=<suite>")
    chosen = (
        next(iter(found.values())) if suite is True else lookup("suite in the results", str(suite), found)
    )
    written = []
    for table in KEYS:
        rows, path = chosen.rows(table), folder / f"{table}.json"
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


def build(cfg: ReportConfig, results: Sequence[Results]) -> str:
    """The page: each suite's tables and figures, the calibration, then what is recorded."""
    parts = [part for item in results for part in _suite(item)]
    parts += _calibration(Path(cfg.artifacts) / cfg.model.name / "rolaq")
    kept = of_model(recorded(Path(cfg.docs) / "results"), cfg.model.name)
    texts = sections(kept)
    if texts:
        parts += [
            html.heading("Recorded results"),
            *(html.folded(name, html.table(text)) for name, text in texts.items()),
        ]
    return html.page(f"RoLaQ on {cfg.model.name}", parts)


def _suite(results: Results) -> list[str]:
    tables = {table: results.rows(table) for table in KEYS}
    name = results.path.stem
    texts = sections(tables)
    figures = draw(tables, results.meta, results.path.parent / "figures" / name)
    newest = max((row for rows in tables.values() for row in rows), key=lambda row: row["date"], default={})
    about = [f"{key} {newest[key]}" for key in ("date", "commit", "gpu", "command") if newest.get(key)]
    about += [f"RULER {key}: {value}" for key, value in results.meta.get("ruler", {}).items()]
    parts = [
        html.heading(f"Suite {name}"),
        html.note(" · ".join(about)),
        html.table(texts.pop("Summary", "")),
    ]
    parts += [html.figure(title, path) for title, path in figures.items()]
    return parts + [html.folded(title, html.table(text)) for title, text in texts.items()]


def _calibration(folder: Path) -> list[str]:
    """Thresholds and gains by layer, and the figures that the calibration left."""
    if not (folder / CONFIG_NAME).is_file():
        return []
    config = read_json(folder / CONFIG_NAME)
    layers = enumerate(zip(config["threshold"], config["gain"], strict=True))
    rows = [{"layer": layer, "T": threshold, "g": gain} for layer, (threshold, gain) in layers]
    parts = [html.heading("Calibration"), html.note(f"seed {config['seed']}, {config['tokens']} tokens")]
    parts += [html.figure(path.stem, path) for path in sorted((folder / "figures").glob("*.png"))]
    return [
        *parts,
        html.folded("Thresholds and gains by layer", html.table(markdown_table(rows, ["layer", "T", "g"]))),
    ]


def run(raw: DictConfig) -> None:
    """Record if asked to, write the page, refresh the tables."""
    cfg = resolve(raw, ReportConfig)
    results, folder = suites(cfg), Path(cfg.docs) / "results"
    name = cfg.model.name
    if not results and not of_model(recorded(folder), name)["quality"]:
        raise RolaqError(f"no results of {name} in {cfg.output}: run `make eval MODEL={name}` first")
    written = record(results, cfg.record, folder)
    page = Path(cfg.output) / name / "report.html"
    with atomic_write(page) as temporary:
        temporary.write_text(build(cfg, results), encoding="utf-8")
    for path in [*written, page, *refresh_pages(cfg.pages, folder)]:
        print(f"wrote {path}")


if __name__ == "__main__":
    run_hydra("report", run)
