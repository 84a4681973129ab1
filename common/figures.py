"""One look for all figures: size, palette, a fixed colour and marker per method."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rolaq.common.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, distinguishable with any common colour vision
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
COLOURS = {
    "bf16": "#000000",
    "rolaq": "#D55E00",
    "oscar": "#0072B2",
    "hadamard": "#009E73",
    "kvarn": "#CC79A7",
    "quarot": "#E69F00",
    "rtn": "#56B4E9",
}
MARKERS = {"bf16": "o", "rolaq": "D", "oscar": "s", "hadamard": "^", "kvarn": "v", "quarot": "P", "rtn": "X"}
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def colour(method: str) -> str:
    """The colour of a method in every figure; other names get a stable one from the palette."""
    return COLOURS.get(method) or PALETTE[sum(method.encode()) % len(PALETTE)]


def marker(method: str) -> str:
    """The marker of a method in every figure."""
    return MARKERS.get(method, ".")


@contextmanager
def figure(
    path: str | os.PathLike[str], width: float = 6.0, height: float = 3.6, rows: int = 1, columns: int = 1
) -> Iterator[Any]:
    """Draw a PNG: yields the axes (an array of them for several panels), saves atomically on success.

    ``width`` and ``height`` are inches for the whole figure, saved at 150 dots per inch. Works
    without a display and leaves pyplot's global state alone.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=PALETTE)}
    with rc_context(style):
        canvas = Figure(figsize=(width, height))
        FigureCanvasAgg(canvas)
        axes: Axes | Any = canvas.subplots(rows, columns)
        yield axes
        with atomic_write(path) as temporary:
            canvas.savefig(temporary, dpi=150, format="png")
