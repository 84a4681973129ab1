"""Progress of long loops: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Generic

from tqdm import tqdm
from typing_extensions import TypeVar

T = TypeVar("T", default=Any)


class Progress(Generic[T]):
    """Iterate with a count, the time left and a postfix of current values.

    Usable as an iterator over ``items`` or, with ``total`` alone, by calling `update`; a context
    manager either way.
    """

    def __init__(
        self, items: Iterable[T] | None = None, *, total: int | None = None, label: str = ""
    ) -> None:
        terminal = sys.stderr.isatty()
        # a log file gets whole lines: no carriage returns, one at most every ten seconds
        self.bar: Any = tqdm(
            items,
            total=total,
            desc=label or None,
            file=sys.stderr if terminal else _Lines(),
            mininterval=0.2 if terminal else 10.0,
            maxinterval=1.0 if terminal else 30.0,
            ncols=None if terminal else 100,
            dynamic_ncols=terminal,
            ascii=None if terminal else " =",
            leave=True,
        )

    def __iter__(self) -> Iterator[T]:
        return iter(self.bar)

    def __enter__(self) -> Progress[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def update(self, steps: int = 1) -> None:
        """Count ``steps`` more."""
        self.bar.update(steps)

    def postfix(self, **values: Any) -> None:
        """Show current values beside the bar; floats with three significant digits."""
        shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in values.items()}
        self.bar.set_postfix(shown, refresh=False)

    def write(self, text: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the display."""
        self.bar.close()


class _Lines:
    """A stream for tqdm that turns each refresh into a line of its own."""

    def write(self, text: str) -> None:
        stripped = text.strip("\r\n ")
        if stripped:
            sys.stderr.write(stripped + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress(items: Iterable[T], label: str = "", total: int | None = None) -> Progress[T]:
    """Iterate over ``items`` with a progress display."""
    return Progress(items, total=total, label=label)
