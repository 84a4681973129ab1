"""Experiment tracking: Weights & Biases, online or offline, or nothing at all.

A run never fails because of tracking: the first problem gives one warning and ends the tracking.
Every number is in local JSON as well.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.config import TrackingConfig
from rolaq.common.errors import one_line


class Tracker:
    """Receives what a run produces; this base class keeps nothing."""

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Curves: numbers at a step."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of flat rows; its columns are the keys in order of appearance."""

    def figure(self, name: str, path: str | os.PathLike[str]) -> None:
        """A picture file."""

    def artifact(self, name: str, type: str, folder: str | os.PathLike[str]) -> None:
        """A folder that this run produced."""

    def use_artifact(self, name: str, type: str, folder: str | os.PathLike[str]) -> None:
        """A folder that this run read. Links the run to its producer by name and content."""

    def finish(self) -> None:
        """End the run; offline, print the command that uploads it."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()


class WandbTracker(Tracker):
    """Weights & Biases, from an initialised ``wandb`` run."""

    def __init__(self, run: Any, offline: bool) -> None:
        self.run, self.offline = run, offline
        self.folder = str(Path(run.dir).parent)

    def _safely(self, action: Callable[[], object]) -> None:
        """Do it; on any failure warn once and stop tracking."""
        if self.run is None:
            return
        try:
            action()
        except Exception as error:  # W&B raises many kinds, none worth losing a run for
            self.run = None
            _warn(error)

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        self._safely(lambda: self.run.log(dict(values), step=step))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(key) for key in columns] for row in rows]
        self._safely(lambda: self.run.log({name: wandb.Table(columns=columns, data=data)}))

    def figure(self, name: str, path: str | os.PathLike[str]) -> None:
        import wandb

        self._safely(lambda: self.run.log({name: wandb.Image(os.fspath(path))}))

    def artifact(self, name: str, type: str, folder: str | os.PathLike[str]) -> None:
        self._safely(lambda: self.run.log_artifact(_bundle(name, type, folder)))

    def use_artifact(self, name: str, type: str, folder: str | os.PathLike[str]) -> None:
        record = {"name": name, "type": type, "sha256": folder_hash(folder)}
        # offline runs cannot declare inputs; the content hash is what links them after a sync
        self._safely(lambda: self.run.config.update({f"input/{name}": record}, allow_val_change=True))
        if not self.offline:
            self._safely(lambda: self.run.use_artifact(_bundle(name, type, folder)))

    def finish(self) -> None:
        active = self.run is not None
        self._safely(lambda: self.run.finish())
        if active and self.offline:
            print(f"tracking: wandb sync {os.path.relpath(self.folder)}")
        self.run = None


def tracker(cfg: TrackingConfig, job: str, config: Mapping[str, Any], folder: str = ".") -> Tracker:
    """Start tracking a run.

    Args:
        cfg: mode, project, entity, tags.
        job: kind of run, such as ``calibrate``; groups runs.
        config: the resolved configuration, as plain values.
        folder: where W&B puts its ``wandb/`` folder.
    """
    if cfg.mode == "none":
        return Tracker()
    try:
        import wandb

        run = wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            tags=list(cfg.tags),
            job_type=job,
            config=dict(config),
            mode="offline" if cfg.mode == "offline" else "online",
            dir=folder,
            settings=wandb.Settings(silent=True, init_timeout=60, console="off"),
        )
    except Exception as error:  # no key, no network, no room: the run goes on without
        _warn(error)
        return Tracker()
    return WandbTracker(run, offline=cfg.mode == "offline")


def folder_hash(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over the names and contents of a folder's files."""
    root, digest = Path(folder), hashlib.sha256()
    for path in sorted(item for item in root.rglob("*") if item.is_file()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _bundle(name: str, type: str, folder: str | os.PathLike[str]) -> Any:
    """The folder as a W&B artifact that carries its content hash."""
    import wandb

    bundle = wandb.Artifact(name, type=type, metadata={"sha256": folder_hash(folder)})
    bundle.add_dir(os.fspath(folder))
    return bundle


def _warn(error: Exception) -> None:
    print(f"warning: tracking stopped, the run goes on: {one_line(error, 200)}", file=sys.stderr)
