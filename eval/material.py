"""Everything measured for one model, from results, artifacts and the recorded files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolaq.common.files import read_json
from rolaq.eval.ablations import read_runs
from rolaq.eval.results import KEYS, Results, Row

RECORDED = (*KEYS, "ablations", "thresholds", "energy_profile", "serve", "kernels", "speed", "calibration")


def recorded(folder: Path) -> dict[str, list[Row]]:
    """Rows of every ``<folder>/*.json``, by file name."""
    return {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}


@dataclass
class Source:
    """The tables of one place: a suite's results, or what is recorded.

    ``meta`` holds the suite's settings and the energy profile.
    """

    name: str
    tables: Mapping[str, Sequence[Row]]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, table: str) -> list[Row]:
        """The rows of a table; none where it is not there."""
        return list(self.tables.get(table, []))


@dataclass
class Material:
    """What a report is made from: sources, best first."""

    model: str
    sources: list[Source]

    def rows(self, table: str, fits: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """Rows of the first source that has fitting ones: numbers of different runs are not mixed."""
        found = ([row for row in source.rows(table) if fits(row)] for source in self.sources)
        return next((rows for rows in found if rows), [])

    def energy(self) -> Mapping[str, Any] | None:
        """The mean and deviation of the energy profile by rank, if it was measured."""
        found = (source.meta["energy"] for source in self.sources if source.meta.get("energy"))
        return next(found, None) or profile_of(self.rows("energy_profile"))


def of_model(tables: Mapping[str, Sequence[Row]], model: str) -> dict[str, list[Row]]:
    """The rows of one model, in the tables that a report shows."""
    return {name: [row for row in tables.get(name, []) if row.get("model") == model] for name in RECORDED}


def gather(model: str, results: Sequence[Results], artifacts: str | Path, docs: Path) -> Material:
    """The suites' results first, then the calibration runs, then what is recorded in ``docs``."""
    sources = [
        Source(item.path.stem, {table: item.rows(table) for table in KEYS}, item.meta) for item in results
    ]
    runs, layers = read_runs(artifacts, model)
    sources.append(Source("calibrations", {"ablations": runs, "thresholds": layers}))
    kept = recorded(docs)
    named = {**of_model(kept, model), **{name: kept.get(name, []) for name in ("kernels", "serve")}}
    return Material(model, [*sources, Source("recorded", named)])


def profile_rows(
    model: str, profile: Mapping[str, Mapping[str, Sequence[float]]], points: int = 64
) -> list[Row]:
    """An energy profile as flat rows at about ``points`` evenly spaced ranks."""
    rows = []
    for name, curve in profile.items():
        n = len(curve["mean"])
        step = max(1, n // points)
        for rank in range(step, n + 1, step):
            numbers = {key: curve[key][rank - 1] for key in ("mean", "std")}
            rows.append({"model": model, "projection": name, "rank": rank, **numbers})
    return rows


def profile_of(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]] | None:
    """The inverse of `profile_rows`, with the ranks."""
    if not rows:
        return None
    names = dict.fromkeys(row["projection"] for row in rows)
    return {
        name: {
            key: [row[key] for row in rows if row["projection"] == name] for key in ("mean", "std", "rank")
        }
        for name in names
    }
