"""State of a run on disk: written whole or not at all, so that a stopped run goes on where it was."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError, one_line
from rolaq.common.files import atomic_write

FORMAT_VERSION = 1
DIGEST = 32  # bytes of SHA-256 before the content


@dataclass
class Best:
    """The validated checkpoint with the lowest S so far: its step, S and the student's state."""

    step: int
    score: float
    student: dict[str, Tensor]


@dataclass
class RunState:
    """Everything an unbroken run would hold after `step` optimisation steps.

    The step is also the position in the data: batch i belongs to step i. `reference` is OSCAR's
    validation KL per length, `seconds` the time spent in optimisation steps.
    """

    identity: dict[str, Any]
    step: int = 0
    student: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    reference: dict[int, float] = field(default_factory=dict)
    best: Best | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    minutes: float = 0.0


def save_state(path: str | os.PathLike[str], state: RunState) -> None:
    """Write `state` atomically."""
    best = None if state.best is None else vars(state.best)
    buffer = io.BytesIO()
    torch.save({**vars(state), "best": best, "format_version": FORMAT_VERSION}, buffer)
    content = buffer.getvalue()
    with atomic_write(path) as temporary:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)


def load_state(path: str | os.PathLike[str]) -> RunState | None:
    """The state at `path`, on the CPU, or None when there is none.

    Only tensors and plain values are read. Raises `RolaqError` for a damaged or foreign file.
    """
    if not Path(path).exists():
        return None
    try:
        content = Path(path).read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
            raise ValueError("it is damaged")
        stored = torch.load(io.BytesIO(content[DIGEST:]), map_location="cpu", weights_only=True)
        if stored.pop("format_version") != FORMAT_VERSION:
            raise ValueError("written by another release")
        best = stored.pop("best")
        return RunState(**stored, best=None if best is None else Best(**best))
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise RolaqError(
            f"{path} cannot be resumed ({one_line(error, 120)}); overwrite=true starts afresh"
        ) from error


def check_identity(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], folder: str | os.PathLike[str]
) -> None:
    """Raise `RolaqError` naming the first setting in which the run in `folder` differs from this one."""
    for key in [*stored, *wanted]:
        before, now = stored.get(key), wanted.get(key)
        if before != now:
            raise RolaqError(
                f"{folder} holds a run with {key}={before}, this one has {key}={now}; "
                "overwrite=true starts afresh, folder=… keeps both"
            )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `{"calib.steps": 350, …}` with plain values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
