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
    "quality": ("model", "method", "seed", "budget", "reading", "domain", "length"),
    "ruler": ("model", "method", "seed", "budget", "reading", "length", "task", "through"),
    "selection": ("model", "method", "seed"),
    "gain_sweep": ("model", "length", "gain"),
    "energy": ("model", "layer"),
}
FORMAT_VERSION = 1

Row = dict[str, Any]


def key_of(table: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that identify ``row`` in its table."""
    return tuple(row.get(name) for name in KEYS[table])


def merge(table: str, old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``old`` rows with ``new`` ones added or put in their place."""
    rows = {key_of(table, row): row for row in old}
    rows.update({key_of(table, row): row for row in new})
    return list(rows.values())


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
    """The tables of one model and suite, backed by ``<output>/<model>/<suite>.json``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta: dict[str, Any] = {}
        self._rows: dict[str, dict[tuple[Any, ...], Row]] = {table: {} for table in KEYS}
        self._stamp = stamp()
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        content = read_json(self.path)
        if content.get("format_version") != FORMAT_VERSION:
            raise RolaqError(f"{self.path} is from another version of RoLaQ: move it away and run again")
        self.meta = content.get("meta", {})
        for table in KEYS:
            self._rows[table] = {key_of(table, row): row for row in content.get(table, [])}

    def rows(self, table: str) -> list[Row]:
        """All rows of a table."""
        return list(self._rows[table].values())

    def find(self, table: str, row: Mapping[str, Any]) -> Row | None:
        """The stored row with this row's key, if it was made from the same inputs (``fingerprint``)."""
        found = self._rows[table].get(key_of(table, row))
        return found if found and found.get("fingerprint") == row.get("fingerprint") else None

    def forget(self, method: str, seed: int | None, method_id: str) -> None:
        """Drop a method's rows that were made with other weights or tensors than ``method_id``."""
        for rows in (self._rows["quality"], self._rows["ruler"]):
            mine = [key for key, row in rows.items() if (row["method"], row["seed"]) == (method, seed)]
            for key in mine:
                if rows[key]["method_id"] != method_id:
                    del rows[key]

    def add(self, table: str, row: Row) -> None:
        """Add or replace a row, stamped with commit, device, command and date."""
        self._rows[table][key_of(table, row)] = {**row, **self._stamp}

    def save(self) -> None:
        """Write the file; a reader sees the old content or the new one."""
        tables = {table: self.rows(table) for table in KEYS}
        write_json(self.path, {"format_version": FORMAT_VERSION, "meta": self.meta, **tables})
