"""The paper's tables and figures as sections of the report: what is there, or the command that measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rolaq.common.files import markdown_table
from rolaq.eval import ablations, experiment_plots, plots
from rolaq.eval.config import METHOD
from rolaq.eval.material import Material
from rolaq.eval.results import Row
from rolaq.eval.tables import at, mean, pivot_markdown, settings
from rolaq.eval.task_tables import (
    comparable_tasks,
    paired_markdown,
    stamp_of,
    task_names,
    task_sections,
)


@dataclass
class Section:
    """One experiment: tables and figures by caption; both are empty where nothing was measured."""

    name: str
    title: str
    tables: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Path] = field(default_factory=dict)
    note: str = ""

    @property
    def empty(self) -> bool:
        """Whether it has nothing to show."""
        return not any(self.tables.values()) and not self.figures


def main_rows(material: Material, table: str) -> list[Row]:
    """Rows of the methods themselves, without ablated ones."""
    return material.rows(table, lambda row: not row.get("variant"))


def accuracy(material: Material) -> dict[str, str | None]:
    """The mean over tasks of each kind of calibration at 0+0, on the same items; kinds that lack a task left out."""
    rows = [
        row for row in material.rows("tasks", lambda row: row["method"] == "rolaq") if row["budget"] == "0+0"
    ]
    rows = comparable_tasks(rows)
    found: dict[str, str | None] = {}
    for kind in dict.fromkeys(row.get("variant") or METHOD for row in rows):
        mine = [row for row in rows if (row.get("variant") or METHOD) == kind and row["seed"] == 42]
        if len(mine) == len(task_names(rows)):
            found[kind] = f"{mean(row['score'] for row in mine):.2f}"
    return found if len(found) > 1 else {}


def table1(material: Material, folder: Path) -> Section:
    """Six tasks by method, budget and seed, and the paired tests."""
    section = Section("table1", "Six tasks (Tables 1 and 8 to 11)")
    rows = main_rows(material, "tasks")
    section.tables = task_sections(rows)
    for name in settings(rows):
        mine = comparable_tasks(at(rows, name))
        stamp = f" – {text}" if (text := stamp_of(mine)) else ""
        path = folder / f"tasks_{name.replace(' ', '_')}.png"
        section.figures[f"Six tasks, {name}{stamp}"] = experiment_plots.task_bars(
            mine, task_names(mine), path
        )
    return section


def table2(material: Material, folder: Path) -> Section:
    """RULER by length and budget."""
    section = Section("table2", "RULER, eight retrieval tasks (Table 2)")
    rows = main_rows(material, "ruler")
    for name in settings(rows):
        for length in sorted({row["length"] for row in at(rows, name)}):
            mine = [row for row in at(rows, name) if row["length"] == length]
            about = f"{length} tokens, {name}, {max(row['n'] for row in mine)} items a task"
            section.tables[f"Score, {about}"] = pivot_markdown(mine, "task", "score")
            section.tables[f"RoLaQ against each method, McNemar's exact test, {about}"] = paired_markdown(
                mine
            )
    return section


def table3(material: Material, folder: Path) -> Section:
    """Components and objectives."""
    section, rows, scores = Section("table3", "What is learned, and from what (Table 3)"), *_runs(material)
    section.tables["Components (a)"] = ablations.components(rows, scores)
    section.tables["Objectives (b)"] = ablations.objectives(rows, scores)
    return section


def table4(material: Material, folder: Path) -> Section:
    """Rotation spaces and gain rules."""
    section, rows, scores = (
        Section("table4", "Rotation spaces and gain rules (Tables 4 and 12)"),
        *_runs(material),
    )
    profile = material.energy()
    width = len(profile["key"]["mean"]) if profile and "rank" not in profile["key"] else None
    width = width or (profile["key"]["rank"][-1] if profile else None)
    section.tables["Rotation spaces (Table 4)"] = ablations.rotations(rows, scores, width)
    section.tables["Gain rules (Table 12)"] = ablations.ranges(rows)
    return section


def _runs(material: Material) -> tuple[list[Row], dict[str, str | None]]:
    return material.rows("ablations"), accuracy(material)


def figure2(material: Material, folder: Path) -> Section:
    """Energy in the leading half, and OSCAR's gain alone."""
    section = Section("figure2", "Two observations (Figure 2)")
    if energy := material.rows("energy"):
        section.figures["Energy in the leading half (a)"] = experiment_plots.energy_bars(
            energy, folder / "figure2a.png"
        )
    if sweep := _longest(material.rows("gain_sweep")):
        section.figures[f"OSCAR's gain alone, {sweep[0]['length']} tokens (b)"] = plots.gain_sweep(
            sweep, folder / "figure2b.png"
        )
        columns = {"gain": "gain", "kappa": "κ", "kl": "KL", "relative": "relative to 1.16"}
        section.tables["OSCAR's gain alone"] = markdown_table(sorted(sweep, key=lambda r: r["gain"]), columns)
    return section


def _longest(rows: list[Row]) -> list[Row]:
    longest = max((row["length"] for row in rows), default=0)
    return [row for row in rows if row["length"] == longest]


def figure4(material: Material, folder: Path) -> Section:
    """KL by response and context length."""
    section = Section("figure4", "Response by context length (Figure 4)")
    if rows := material.rows("kappa_sweep"):
        section.figures["KL by response"] = experiment_plots.kappa_lines(rows, folder / "figure4.png")
        lines = [
            {"tokens": length, **{f"{r['kappa']:g}": r["relative"] for r in rows if r["length"] == length}}
            for length in sorted({row["length"] for row in rows})
        ]
        names = [key for key in lines[0] if key != "tokens"]
        section.tables["KL relative to κ = 1"] = markdown_table(
            lines, {"tokens": "tokens", **{k: f"κ {k}" for k in names}}
        )
    return section


def figure5(material: Material, folder: Path) -> Section:
    """Six-task mean, and KL, by budget."""
    section = Section("figure5", "Token protection (Figure 5)")
    if rows := main_rows(material, "tasks"):
        section.figures["Mean of the tasks by budget"] = experiment_plots.budgets(
            comparable_tasks(rows), "score", "mean of the tasks, %", folder / "figure5.png"
        )
        section.note = stamp_of(comparable_tasks(rows))
    if kl := [row for row in main_rows(material, "quality") if row["method"] != "bf16"]:
        section.figures["KL by budget"] = experiment_plots.budgets(
            kl, "kl", "KL to BF16, nats per token", folder / "figure5_kl.png"
        )
    return section


def figure7(material: Material, folder: Path) -> Section:
    """The energy profile by rank."""
    section = Section("figure7", "Cumulative projection energy (Figure 7)")
    if profile := material.energy():
        section.figures["Energy by rank"] = plots.energy(profile, folder / "figure7.png")
    return section


def figure8(material: Material, folder: Path) -> Section:
    """Thresholds by layer."""
    section = Section("figure8", "Learned thresholds (Figure 8)")
    if layers := material.rows("thresholds"):
        section.figures["Threshold by layer"] = experiment_plots.threshold_lines(
            layers, folder / "figure8.png"
        )
        section.tables["Mean threshold"] = ablations.thresholds(layers)
    return section


SECTIONS: tuple[Callable[[Material, Path], Section], ...] = (
    table1, table2, table3, table4, figure2, figure4, figure5, figure7, figure8,
)  # fmt: skip
