"""Figures of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.figures import colour, figure, marker
from rolaq.eval.results import Row
from rolaq.eval.ruler_config import RULER_SHORT
from rolaq.eval.tables import at, distinct, mean, methods, settings


def draw(tables: Mapping[str, Sequence[Row]], meta: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Every figure that the rows allow, as PNG files in ``folder``, by title."""
    quality = [row for row in tables.get("quality", []) if row["method"] != "bf16"]
    ruler = tables.get("ruler", [])
    found: dict[str, Path] = {}
    for name in settings(quality):
        rows, suffix = at(quality, name), f"{name.replace(' ', '_')}.png"
        found[f"KL by domain, {name}"] = by_category(rows, "domain", "kl", folder / f"kl_domain_{suffix}")
        if len(distinct(rows, "length")) > 1:
            found[f"KL by length, {name}"] = by_length(rows, folder / f"kl_length_{suffix}")
    for name in settings(ruler):
        path = folder / f"ruler_{name.replace(' ', '_')}.png"
        found[f"RULER by task, {name}"] = by_category(at(ruler, name), "task", "score", path)
    if tables.get("gain_sweep"):
        found["Gain sweep"] = gain_sweep(tables["gain_sweep"], folder / "gain_sweep.png")
    if meta.get("energy"):
        found["Projection energy"] = energy(meta["energy"], folder / "energy.png")
    return found


LABELS = {"kl": "KL to BF16, nats per token", "score": "RULER score"}


def by_category(rows: Sequence[Row], across: str, value: str, path: Path) -> Path:
    """One dot per method over each domain or task; KL on a logarithmic scale."""
    names = distinct(rows, across)
    series = methods(rows)
    with figure(path, width=7.5, height=3.8) as axes:
        for index, (name, mine) in enumerate(series.items()):
            shift = 0.6 * (index / max(1, len(series) - 1) - 0.5)
            heights = [mean(row[value] for row in mine if row[across] == c) for c in names]
            style = {"color": colour(mine[0]["method"]), "marker": marker(mine[0]["method"])}
            axes.plot([x + shift for x in range(len(names))], heights, linestyle="", label=name, **style)
        axes.set_xticks(range(len(names)), [RULER_SHORT.get(c, c) for c in names], rotation=30, ha="right")
        axes.set_ylabel(LABELS[value])
        if value == "kl":
            _log_scale(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return path


def _log_scale(axes: Any) -> None:
    """Logarithmic with plain numbers: at 1, 2, 5 of a decade, at every tick of a narrow range."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 3 * low else "")


def by_length(rows: Sequence[Row], path: Path) -> Path:
    """KL over sequence length, averaged over domains."""
    lengths = sorted(distinct(rows, "length"))
    with figure(path) as axes:
        for name, mine in methods(rows).items():
            heights = [mean(row["kl"] for row in mine if row["length"] == n) for n in lengths]
            style = {"color": colour(mine[0]["method"]), "marker": marker(mine[0]["method"])}
            axes.plot(lengths, heights, label=name, **style)
        axes.set_xscale("log", base=2)
        _log_scale(axes)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("sequence length, tokens")
        axes.set_ylabel(LABELS["kl"])
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return path


def gain_sweep(rows: Sequence[Row], path: Path) -> Path:
    """Figure 2b: KL relative to that at OSCAR's gain; the dotted line is unit response."""
    order = sorted(rows, key=lambda row: row["gain"])
    with figure(path, width=4.6) as axes:
        axes.plot(
            [row["gain"] for row in order],
            [row["relative"] for row in order],
            marker="o",
            color=colour("oscar"),
        )
        axes.axvline(1.16, linestyle="--", color="0.5", linewidth=1)
        axes.axvline(order[0]["gain"] / order[0]["kappa"], linestyle=":", color="0.5", linewidth=1)
        axes.axhline(1, color="0.8", linewidth=1)
        axes.set_xlabel("gain, OSCAR's rotation and threshold")
        axes.set_ylabel("KL relative to gain 1.16")
    return path


def energy(profile: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> Path:
    """Figure 7: cumulative energy by rank, mean and one standard deviation over layers."""
    with figure(path, width=4.6) as axes:
        for name, line, shade in (("key", "-", "#0072B2"), ("value", "--", "#D55E00")):
            average, spread = profile[name]["mean"], profile[name]["std"]
            ranks = profile[name].get("rank") or range(1, len(average) + 1)
            width = ranks[-1]
            axes.plot(ranks, [100 * x for x in average], linestyle=line, color=shade, label=f"{name}s")
            bounds = (
                [100 * (a + sign * s) for a, s in zip(average, spread, strict=True)] for sign in (-1, 1)
            )
            axes.fill_between(ranks, *bounds, color=shade, alpha=0.2, linewidth=0)
        axes.plot([0, width], [0, 100], color="0.6", linewidth=1, label="isotropic")
        axes.axvline(width / 2, linestyle="--", color="0.5", linewidth=1)
        axes.set_xlabel("leading joint directions")
        axes.set_ylabel("energy, %")
        axes.legend(loc="lower right")
    return path
