"""Result rows: stamped, merged into one JSON file, copied into the recorded results, shown as a table."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.cli import program
from rolaq.common.errors import RolaqError
from rolaq.common.files import environment, markdown_table, read_json, write_json

Row = dict[str, Any]

# what makes a row unique; a newer row with the same key replaces the older one
KEY = ("figure", "impl", "model", "budget", "mode", "requests", "input_tokens", "output_tokens", "gpus")
COMPARED = ("capacity", "decode", "decode_interval", "ttft_p50", "ttft_p99")
COLUMNS = {
    "figure": "figure", "impl": "implementation", "model": "model", "budget": "budget", "mode": "mode",
    "requests": "requests", "input_tokens": "input", "output_tokens": "output", "bound": "", "value": "value",
    "unit": "unit",
}  # fmt: skip


def stamp(rows: Iterable[Row]) -> list[Row]:
    """The rows with commit, device, command, versions and date (UTC)."""
    found = environment()
    about = {
        "commit": found["commit"],
        "gpu": found["device"],
        "command": program(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    return [{**row, **about} for row in rows]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values that identify a row."""
    return tuple(row.get(name) for name in KEY)


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``old`` rows with ``new`` ones added or put in their place."""
    rows = {key_of(row): row for row in old}
    rows.update({key_of(row): row for row in new})
    return list(rows.values())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where there is no file.

    Raises:
        RolaqError: the file holds something else.
    """
    content = read_json(path) if path.exists() else []
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise RolaqError(f"{path} holds no list of rows: move it away and run again")
    return content


def save(path: Path, rows: Sequence[Row]) -> Path:
    """Merge rows into a file."""
    return write_json(path, merge(read_rows(path), rows))


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; columns without any value are left out."""
    shown = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in rows)]
    return markdown_table(rows, {name: COLUMNS[name] or "bound" for name in shown})


def value(rows: Iterable[Row], **wanted: Any) -> float | None:
    """The value of the row that has all these columns, or None."""
    return next((row["value"] for row in rows if all(row.get(k) == v for k, v in wanted.items())), None)


def ratios(rows: Sequence[Row], ours: str = "int2") -> list[Row]:
    """How `ours` compares with every other implementation, row by row: above 1 is better.

    Times are turned round, so that more is better everywhere.
    """
    found = []
    for row in rows:
        if row["figure"] not in COMPARED:
            continue
        mine = value(
            rows, **{name: row.get(name) for name in KEY if name not in ("impl", "budget")}, impl=ours
        )
        if row["impl"] == ours or mine is None or not mine or not row["value"]:
            continue
        ratio = row["value"] / mine if row["unit"] == "s" else mine / row["value"]
        shape = {
            name: row.get(name) for name in ("figure", "requests", "input_tokens", "output_tokens", "bound")
        }
        found.append({**shape, "against": row["impl"], "ratio": ratio})
    return found


def ratio_table(rows: Sequence[Row]) -> str:
    """How INT2 compares, as Markdown; empty where there is nothing to compare."""
    columns = ("figure", "requests", "input_tokens", "output_tokens", "against", "bound", "ratio")
    found = ratios(rows)
    return markdown_table(found, {name: COLUMNS.get(name) or name for name in columns}) if found else ""
