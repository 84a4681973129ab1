"""The report as one HTML page: headline, paired tests, figures, configuration, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rolaq.common.files import markdown_table, read_json
from rolaq.eval import html
from rolaq.eval.experiment_sections import SECTIONS, Section, main_rows
from rolaq.eval.material import Material, Source
from rolaq.eval.plots import draw
from rolaq.eval.results import Row
from rolaq.eval.tables import at, sections, settings
from rolaq.eval.task_tables import averaged_markdown, comparable_tasks, stamp_of, totals_markdown
from rolaq.quant.artifact import CONFIG_NAME

HIDDEN = ("commit", "command", "date", "fingerprint", "gpu", "model", "items", "correct", "method_id")


def build(
    material: Material, artifact: Path, readings: dict[str, str], figures: Path
) -> tuple[str, dict[str, Path]]:
    """The page, and the figures in it by caption.

    Args:
        artifact: folder of the model's RoLaQ artifact, for thresholds and the figures it holds.
        readings: what to say about a section, by its name.
        figures: where new figures are drawn.
    """
    found = [make(material, figures) for make in SECTIONS]
    parts = [
        *_headline(material),
        *(part for item in found if not item.empty for part in _section(item, readings)),
    ]
    drawn = {title: path for item in found for title, path in item.figures.items()}
    parts += _serving(material)
    parts += _calibration(artifact)
    for source in material.sources:
        more, own = _source(source, figures)
        parts += more
        drawn |= own
    parts += _configuration(material) + _missing(material, found)
    return html.page(f"RoLaQ on {material.model}", parts), drawn


def _headline(material: Material) -> list[str]:
    """When and on what it was measured, accuracy per budget, the summary of KL, perplexity and RULER."""
    quality, ruler, tasks = (main_rows(material, name) for name in ("quality", "ruler", "tasks"))
    rows = [*quality, *ruler, *tasks]
    about = [" and ".join(sorted({row[key] for row in rows if row.get(key)})) for key in ("date", "gpu")]
    parts = [
        html.note(f"measured {' on '.join(filter(None, about))}; every row names its commit and command")
    ]
    parts.append(html.heading("In short"))
    for name in settings(tasks):
        mine = comparable_tasks(at(tasks, name))
        stamp = f" – {text}" if (text := stamp_of(mine)) else ""
        parts += [
            html.heading(f"Six tasks, accuracy in %, {name}{stamp}", 3),
            html.table(averaged_markdown(mine)),
        ]
    if summary := sections({"quality": quality, "ruler": ruler}).get("Summary"):
        parts += [html.heading("KL to BF16, perplexity, RULER", 3), html.table(summary)]
    parts += _against(tasks)
    return parts


def _against(tasks: Sequence[Row]) -> list[str]:
    """RoLaQ against every baseline, all tasks together."""
    parts = []
    for name in settings(tasks):
        if text := totals_markdown(comparable_tasks(at(tasks, name))):
            title = f"RoLaQ against each method, {name}: all items, McNemar's exact test"
            parts += [html.heading(title, 3), html.table(text)]
    return parts


def _section(section: Section, readings: dict[str, str]) -> list[str]:
    parts = [html.heading(section.title)]
    parts += [html.note(section.note)] if section.note else []
    parts += [html.paragraph(text) for text in readings.get(section.name, "").split("\n\n") if text.strip()]
    parts += [html.figure(title, path) for title, path in section.figures.items()]
    for title, text in section.tables.items():
        if text and (
            section.name == "table1" or "against" in title
        ):  # the former are in the headline already
            parts.append(html.folded(title, html.table(text)))
        elif text:
            parts.append(html.heading(title, 3) + html.table(text))
    return parts


def _serving(material: Material) -> list[str]:
    """Figure 6: capacity, decoding, first tokens, as the serving bench recorded them."""
    rows = material.rows("serve")
    if not rows:
        return []
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in HIDDEN]
    return [html.heading("Serving (Figure 6)"), html.table(markdown_table(rows, columns))]


def _calibration(folder: Path) -> list[str]:
    """Thresholds and gains by layer, and the figures that the calibration left."""
    if not (folder / CONFIG_NAME).is_file():
        return []
    config = read_json(folder / CONFIG_NAME)
    layers = enumerate(zip(config["threshold"], config["gain"], strict=True))
    rows = [{"layer": layer, "T": threshold, "g": gain} for layer, (threshold, gain) in layers]
    parts = [html.heading("Calibration"), html.note(f"seed {config['seed']}, {config['tokens']} tokens")]
    parts += [html.figure(path.stem, path) for path in sorted((folder / "figures").glob("*.png"))]
    table = html.table(markdown_table(rows, ["layer", "T", "g"]))
    return [*parts, html.folded("Thresholds and gains by layer", table)]


def _source(source: Source, folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Every other table and figure of one suite, or of what is recorded."""
    texts = sections(source.tables)
    if not texts:
        return [], {}
    figures = draw(source.tables, source.meta, folder / source.name)
    about = [f"RULER {key}: {value}" for key, value in source.meta.get("ruler", {}).items()]
    title = "Recorded results" if source.name == "recorded" else f"Suite {source.name}"
    parts = [html.heading(title), html.note(" · ".join(about))]
    parts += [html.folded(name, html.table(text)) for name, text in texts.items()]
    shown = "".join(html.figure(name, path) for name, path in figures.items())
    return [*parts, html.folded("Figures", shown)] if shown else parts, figures


def _configuration(material: Material) -> list[str]:
    """The effective configuration of each suite, and the commands of the recorded rows."""
    parts = []
    for source in material.sources:
        if config := source.meta.get("config"):
            text: Any = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            parts.append(html.folded(f"Suite {source.name}", html.preformatted(text)))
    rows = [row for source in material.sources for table in source.tables for row in source.rows(table)]
    commands = dict.fromkeys(row["command"] for row in rows if row.get("command"))
    if commands:
        parts.append(html.folded("Commands", html.preformatted("\n".join(commands))))
    return [html.heading("Configuration"), *parts] if parts else []


def _missing(material: Material, found: Sequence[Section]) -> list[str]:
    """What was not measured, with the command that does."""
    model = material.model
    lines = {
        f"{item.title}": f"make experiment NAME={item.name} MODEL={model}" for item in found if item.empty
    }
    for item in found:
        gaps = [title for title, text in item.tables.items() if not text and "against" not in title]
        if gaps and not item.empty:
            lines[f"{item.title}: {', '.join(gaps)}"] = f"make experiment NAME={item.name} MODEL={model}"
    if not material.rows("quality"):
        lines["KL and perplexity by domain and length"] = f"make eval MODEL={model} SUITE=full"
    if not material.rows("serve"):
        lines["Serving (Figure 6)"] = "make bench"
    if limited := stamp_of(material.rows("tasks")):
        lines[f"Six tasks at full size ({limited})"] = f"make experiment NAME=table1 MODEL={model}"
    if not lines:
        return []
    rows = [{"what": what, "command": command} for what, command in lines.items()]
    return [html.heading("What is missing"), html.table(markdown_table(rows, ["what", "command"]))]
