"""Figures of a run, laid out like the paper's Figure 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.figures import PALETTE, figure
from rolaq.serve.bench.results import Row

STYLES = {
    "int2": ("#D55E00", "D"),
    "bf16-triton": ("#000000", "o"),
    "bf16-flashmla": ("#0072B2", "s"),
    "bf16-fa3": ("#56B4E9", "^"),
    "fp8-flashmla": ("#009E73", "v"),
}


def style(name: str) -> dict[str, str]:
    """Colour and marker of an implementation in every panel."""
    colour, marker = STYLES.get(name, (PALETTE[sum(name.encode()) % len(PALETTE)], "P"))
    return {"color": colour, "marker": marker}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One PNG per model with a panel for each kind of measurement that the rows hold."""
    drawn = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        panels = [panel for names, panel in PANELS if any(row["figure"] in names for row in mine)]
        if not panels:
            continue
        path = folder / f"serve_{model}.png"
        with figure(path, width=3.7 * len(panels), height=3.2, columns=len(panels)) as axes:
            for panel, ax in zip(panels, axes if len(panels) > 1 else [axes], strict=True):
                panel(ax, mine)
        drawn.append(path)
    return drawn


def implementations(rows: Sequence[Row]) -> list[str]:
    """The implementations of some rows, the packed cache last."""
    return sorted(dict.fromkeys(row["impl"] for row in rows), key=lambda name: name.startswith("int2"))


def capacity(ax: Any, rows: Sequence[Row]) -> None:
    """Bars: tokens that fit."""
    mine = [row for row in rows if row["figure"] == "capacity"]
    names = [f"{row['impl']}\n{row['budget']}" if row.get("budget") else row["impl"] for row in mine]
    heights = [row["value"] / 1e6 for row in mine]
    bars = ax.bar(range(len(mine)), heights, color=[style(row["impl"])["color"] for row in mine])
    ax.bar_label(bars, fmt="{:.2f}", fontsize=7)
    ax.set_xticks(range(len(mine)), names, rotation=40, ha="right", fontsize=7)
    ax.set_ylabel("tokens that fit, millions")
    ax.set_title("Capacity")


def by_input(ax: Any, rows: Sequence[Row]) -> None:
    """Decode throughput over input length."""
    mine = [row for row in rows if row["figure"] == "decode"]
    _lines(ax, mine, "input_tokens")
    ax.set_title(f"Decode, {mine[0]['requests']} requests")
    ax.set_xlabel("input, tokens")
    ax.set_ylabel("tokens per second")
    ax.legend(fontsize=7)


def by_interval(ax: Any, rows: Sequence[Row]) -> None:
    """Bars: decode throughput over an interval of output positions."""
    mine = [row for row in rows if row["figure"] == "decode_interval"]
    bars = ax.bar(
        range(len(mine)), [row["value"] for row in mine], color=[style(row["impl"])["color"] for row in mine]
    )
    ax.bar_label(bars, fmt="{:.0f}", fontsize=7)
    ax.set_xticks(range(len(mine)), [row["impl"] for row in mine], rotation=40, ha="right", fontsize=7)
    begin, end = mine[0]["output_from"], mine[0]["output_tokens"]
    ax.set_title(f"Decode, output {short(begin)} to {short(end)}")
    ax.set_ylabel("tokens per second")


def first_token(ax: Any, rows: Sequence[Row]) -> None:
    """Time to the first token over concurrency: P99 full, P50 dashed; hollow where it is a lower bound."""
    for q, dash in ((99, "-"), (50, ":")):
        mine = [row for row in rows if row["figure"] == f"ttft_p{q}"]
        _lines(ax, mine, "requests", linestyle=dash, suffix="" if q == 99 else None)
        for row in mine:
            if row.get("bound"):
                look = {**style(row["impl"]), "markerfacecolor": "white", "linestyle": ""}
                ax.plot([row["requests"]], [row["value"]], zorder=3, **look)
    ax.set_yscale("log")
    ax.set_title("Time to first token, P99 (dotted: P50)")
    ax.set_xlabel("simultaneous requests")
    ax.set_ylabel("seconds (hollow: at least)")
    ax.legend(fontsize=7)


def _lines(ax: Any, rows: Sequence[Row], across: str, suffix: str | None = "", **more: Any) -> None:
    """A line for each implementation; without a legend entry where ``suffix`` is None."""
    ax.set_xscale("log", base=2)
    for name in implementations(rows):
        points = sorted((row[across], row["value"]) for row in rows if row["impl"] == name)
        label = None if suffix is None else name + suffix
        ax.plot(*zip(*points, strict=True), label=label, **style(name), **more)
    ticks = sorted({row[across] for row in rows})
    ax.set_xticks(ticks, [short(tick) for tick in ticks], rotation=40, ha="right", fontsize=7)
    ax.minorticks_off()


def short(number: int) -> str:
    """A count as 4K or 256."""
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)


Panel = Callable[[Any, Sequence[Row]], None]
PANELS: list[tuple[tuple[str, ...], Panel]] = [
    (("capacity",), capacity),
    (("decode",), by_input),
    (("decode_interval",), by_interval),
    (("ttft_p99",), first_token),
]
