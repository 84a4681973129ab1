"""The paper's figures from the rows of the experiments."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.figures import PALETTE, colour, figure, marker
from rolaq.eval.ablations import ROTATIONS
from rolaq.eval.energy import summary as energy_summary
from rolaq.eval.results import Row
from rolaq.eval.tables import at, distinct, mean, methods, settings
from rolaq.quant.spec import QuantizerSpec

OUTSIDE = {"loc": "upper left", "bbox_to_anchor": (1, 1)}


def energy_bars(rows: Sequence[Row], path: Path) -> Path:
    """Figure 2a: key and value energy in the leading half of the joint spectrum, sample deviation over layers."""
    found = energy_summary(rows)
    with figure(path, width=3.4, height=3.2) as axes:
        for place, (average, spread) in enumerate(found.values()):
            axes.bar(place, average, yerr=spread, width=0.6, color=PALETTE[place], capsize=4)
            axes.annotate(f"{average:.1f}", (place, 2), ha="center", color="white")
        axes.axhline(50, linestyle="--", color="0.4", linewidth=1)
        axes.set_xticks(range(len(found)), [f"{name}s" for name in found])
        axes.set_ylabel("energy in the leading half, %")
        axes.set_ylim(0, 100)
    return path


def kappa_lines(rows: Sequence[Row], path: Path) -> Path:
    """Figure 4: KL by response, one line per context length, divided by that at response 1."""
    with figure(path, width=5.2) as axes:
        for place, length in enumerate(sorted(distinct(rows, "length"))):
            mine = sorted((row for row in rows if row["length"] == length), key=lambda row: row["kappa"])
            values = [row["relative"] for row in mine]
            axes.plot(
                [row["kappa"] for row in mine],
                values,
                marker="o",
                color=PALETTE[place],
                label=f"{length} tokens",
            )
        axes.axvline(1, linestyle="--", color="0.5", linewidth=1)
        axes.set_xlabel("response κ = g C(T)")
        axes.set_ylabel("KL relative to κ = 1")
        axes.legend(**OUTSIDE)
    return path


def budgets(rows: Sequence[Row], value: str, label: str, path: Path) -> Path:
    """Figure 5: a method's mean over tasks (or domains) by protection budget, over seeds where there are several."""
    names = [name for name in settings(rows) if " " not in name]
    with figure(path, width=5.6) as axes:
        for name, mine in methods(rows, seeds=False).items():
            points = [mean(row[value] for row in at(mine, budget)) for budget in names]
            style = {"color": colour(mine[0]["method"]), "marker": marker(mine[0]["method"])}
            axes.plot(
                range(len(names)), [float("nan") if y is None else y for y in points], label=name, **style
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("sink + recent tokens in BF16")
        axes.set_ylabel(label)
        axes.legend(**OUTSIDE)
    return path


def threshold_lines(layers: Sequence[Row], path: Path) -> Path:
    """Figure 8: learned thresholds by layer, a colour per rotation and a line per seed."""
    coupled = [row for row in layers if row["kind"].endswith("-learned-coupled-both")]
    kinds = distinct(coupled, "kind")
    with figure(path, width=5.6) as axes:
        for place, kind in enumerate(kinds):
            for number, seed in enumerate(distinct([r for r in coupled if r["kind"] == kind], "seed")):
                mine = [row for row in coupled if (row["kind"], row["seed"]) == (kind, seed)]
                label = ROTATIONS.get(kind.split("-")[0], kind) if not number else None
                line = {"color": PALETTE[place % len(PALETTE)], "label": label, "marker": "o", "alpha": 0.8}
                axes.plot([row["layer"] for row in mine], [row["threshold"] for row in mine], **line)
        axes.axhline(QuantizerSpec().threshold_init, linestyle="--", color="0.4", linewidth=1)
        axes.set_xlabel("layer")
        axes.set_ylabel("threshold T")
        axes.legend(**OUTSIDE)
    return path


def task_bars(rows: Sequence[Row], names: Mapping[str, str], path: Path) -> Path:
    """Table 1 as a figure: a dot per method and task, bars over seeds."""
    series = methods(rows, seeds=False)
    with figure(path, width=7.5, height=3.8) as axes:
        for index, (name, mine) in enumerate(series.items()):
            shift = 0.6 * (index / max(1, len(series) - 1) - 0.5)
            scores = [[row["score"] for row in mine if row["task"] == task] for task in names]
            heights: list[Any] = [statistics.mean(own) if own else float("nan") for own in scores]
            errors = [statistics.stdev(own) if len(own) > 1 else 0 for own in scores]
            style = {"color": colour(mine[0]["method"]), "marker": marker(mine[0]["method"])}
            places = [place + shift for place in range(len(names))]
            axes.errorbar(places, heights, yerr=errors, linestyle="", label=name, elinewidth=1, **style)
        axes.set_xticks(range(len(names)), list(names.values()), rotation=20, ha="right")
        axes.set_ylabel("score, %")
        axes.legend(**OUTSIDE)
    return path
