"""Results as flat rows in one JSON file, written as they come so that a stopped run resumes."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolaq.common.cli import program
from rolaq.common.errors import RolaqError
from rolaq.common.files import environment, read_json, write_json

# What makes a row of a table unique; a newer row with the same key replaces the older one.
KEYS: dict[str, tuple[str, ...]] = {
    "quality": ("model", "method", "seed", "variant", "budget", "reading", "domain", "length"),
    "ruler": ("model", "method", "seed", "variant", "budget", "reading", "length", "task", "through"),
    "tasks": ("model", "method", "seed", "variant", "budget", "reading", "task", "limit", "through"),
    "selection": ("model", "method", "seed"),
    "gain_sweep": ("model", "length", "gain"),
    "kappa_sweep": ("model", "variant", "seed", "length", "kappa"),
    "energy": ("model", "layer"),
}
# what belongs to no suite, but is recorded with the others
RECORD_KEYS: dict[str, tuple[str, ...]] = {
    **KEYS,
    "ablations": ("model", "kind", "seed"),
    "thresholds": ("model", "kind", "seed", "layer"),
    "energy_profile": ("model", "projection", "rank"),
}
FORMAT_VERSION = 1

Row = dict[str, Any]


def key_of(table: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that identify ``row`` in its table."""
    return tuple(row.get(name) for name in RECORD_KEYS[table])


def merge(table: str, old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``old`` rows with ``new`` ones added or put in their place."""
    rows = {key_of(table, row): row for row in old}
    rows.update({key_of(table, row): row for row in new})
    return list(rows.values())


def version_of(table: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row's key and what it was made from: tells a forgotten row from a newer one in its place."""
    return (*key_of(table, row), *(row.get(name) for name in ("method_id", "text", "fingerprint")))


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results file.

    Raises:
        RolaqError: damaged, or written by another version.
    """
    content = read_json(path)
    damaged = RolaqError(f"{path} is damaged: move it away and run again")
    if not isinstance(content, dict):
        raise damaged
    if content.get("format_version") != FORMAT_VERSION:
        raise RolaqError(f"{path} is from another version of RoLaQ: move it away and run again")
    tables = [content.get(table, []) for table in KEYS]
    flat = all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in tables)
    if not flat or not isinstance(content.get("meta", {}), dict):
        raise damaged
    return content


def stamp() -> Row:
    """What every recorded row carries: commit, device, command and date (UTC)."""
    found = environment()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "commit": found["commit"],
        "gpu": found["device"],
        "command": program(),
        "date": now.strftime("%Y-%m-%d"),
    }


class Results:
    """The tables of one model and suite, backed by ``<output>/<model>/<suite>.json``.

    Other processes may write the same file: saving keeps their rows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta: dict[str, Any] = {}
        self._rows: dict[str, dict[tuple[Any, ...], Row]] = {table: {} for table in KEYS}
        self._added: dict[str, set[tuple[Any, ...]]] = {table: set() for table in KEYS}
        self._forgotten: dict[str, set[tuple[Any, ...]]] = {table: set() for table in KEYS}
        self._stamp = stamp()
        self._read()

    def _read(self) -> None:
        """Take the file's rows, but for those that were added or forgotten here."""
        if not self.path.exists():
            return
        content = read_results(self.path)
        self.meta = {**content.get("meta", {}), **self.meta}
        for table in KEYS:
            gone, added = self._forgotten[table], self._added[table]
            there = [row for row in content.get(table, []) if version_of(table, row) not in gone]
            mine = [row for key, row in self._rows[table].items() if key in added]
            self._rows[table] = {key_of(table, row): row for row in merge(table, there, mine)}

    def rows(self, table: str) -> list[Row]:
        """All rows of a table."""
        return list(self._rows[table].values())

    def find(self, table: str, row: Mapping[str, Any]) -> Row | None:
        """The stored row with this row's key, if it was made from the same inputs (``fingerprint``)."""
        found = self._rows[table].get(key_of(table, row))
        return found if found and found.get("fingerprint") == row.get("fingerprint") else None

    def forget(self, method: str, seed: int | None, method_id: str, variant: str | None = None) -> None:
        """Drop a method's simulated rows that were made with other weights or tensors than ``method_id``."""
        for table in ("quality", "ruler", "tasks"):
            for row in self.rows(table):
                mine = tuple(row.get(key) for key in ("method", "seed", "variant")) == (method, seed, variant)
                if mine and row.get("method_id") != method_id and row.get("through") != "server":
                    self._drop(table, row)

    def forget_text(self, model: str, text: str) -> None:
        """Drop a model's quality rows that say that they come from another ``text``."""
        for row in self.rows("quality"):
            if row.get("model") == model and row.get("text") not in (None, text):
                self._drop("quality", row)

    def _drop(self, table: str, row: Row) -> None:
        """Remove a row, also from the file at the next save."""
        key = key_of(table, row)
        self._forgotten[table].add(version_of(table, row))
        self._added[table].discard(key)
        del self._rows[table][key]

    def add(self, table: str, row: Row) -> None:
        """Add or replace a row, stamped with commit, device, command and date."""
        key = key_of(table, row)
        self._forgotten[table].discard(version_of(table, row))
        self._added[table].add(key)
        self._rows[table][key] = {**row, **self._stamp}

    def save(self) -> None:
        """Write the file, with what others wrote meanwhile; a reader sees the old content or the new one."""
        self._read()
        tables = {table: self.rows(table) for table in KEYS}
        write_json(self.path, {"format_version": FORMAT_VERSION, "meta": self.meta, **tables})
