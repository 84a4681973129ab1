"""Errors meant for the person at the terminal: one line that says what to do."""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class RolaqError(Exception):
    """Something the user can fix. The message is one line: what, which value, what to do."""


def debugging() -> bool:
    """True when ``ROLAQ_DEBUG=1``: commands then show full tracebacks."""
    return os.environ.get("ROLAQ_DEBUG", "0") not in ("", "0")


def unknown(kind: str, name: str, options: Iterable[str]) -> RolaqError:
    """The error for a name that is not among ``options``, with the nearest ones suggested."""
    names = sorted(str(option) for option in options)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f" Did you mean: {', '.join(near)}?" if near else ""
    return RolaqError(f"Unknown {kind} '{name}'.{hint} Available: {', '.join(names) or 'none'}")


def lookup(kind: str, name: str, options: Mapping[str, T]) -> T:
    """``options[name]``.

    Raises:
        RolaqError: the name is not there; says which ones are, nearest first.
    """
    if name not in options:
        raise unknown(kind, name, options)
    return options[name]


def one_line(error: BaseException | str, limit: int = 400) -> str:
    """An error's message on a single line of at most ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def main(fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command's entry point.

    A RolaqError is printed as ``error: <one line>`` and ends the process with 1, Ctrl-C with
    130. Anything else is a defect and keeps its traceback, as everything does with
    ``ROLAQ_DEBUG=1``.
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except RolaqError as error:
            if debugging():
                raise
            print(f"error: {one_line(error, limit=2000)}", file=sys.stderr)
            sys.exit(1)
        except OSError as error:  # disk full, no permission, a file where a folder should be
            if debugging():
                raise
            print(f"error: {one_line(error)}: free space, or choose another folder", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt as stop:
            print(f"stopped: {one_line(stop) if str(stop) else 'interrupted'}", file=sys.stderr)
            sys.exit(130)

    return wrapped
