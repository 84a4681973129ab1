"""Tables in Markdown pages, made from the recorded results between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rolaq.common.errors import lookup
from rolaq.common.files import atomic_write, markdown_table, read_json
from rolaq.eval.results import KEYS, Row
from rolaq.eval.tables import at, distinct, pivot_markdown, sections, settings, summary_markdown

Tables = Mapping[str, Sequence[Row]]

MARKED = re.compile(r"(<!-- results:start ?([\w-]*) *-->\n).*?(<!-- results:end -->)", re.DOTALL)


def recorded(folder: Path) -> dict[str, list[Row]]:
    """Rows of every ``<folder>/*.json``, by file name."""
    return {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}


def refresh(page: Path, tables: Tables) -> bool:
    """Replace what stands between the markers of a page; true if that changed it.

    ``<!-- results:start NAME -->`` picks a table of `TABLES`, without a name the overview;
    ``<!-- results:end -->`` closes it. A table without rows says so.

    Raises:
        RolaqError: a name that is not in `TABLES`.
    """
    old = page.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        text = lookup("table", match[2] or "overview", TABLES)(tables).strip()
        return f"{match[1]}\n{text or 'No results are recorded yet.'}\n\n{match[3]}"

    new = MARKED.sub(fill, old)
    if new != old:
        with atomic_write(page) as temporary:
            temporary.write_text(new, encoding="utf-8")
    return new != old


def of_model(tables: Tables, model: str) -> dict[str, list[Row]]:
    """The rows of one model, in the tables that an evaluation makes."""
    return {name: [row for row in tables.get(name, []) if row["model"] == model] for name in KEYS}


def _models(tables: Tables, *names: str) -> list[str]:
    return distinct([row for name in names for row in tables.get(name, [])], "model")


def _by_model(tables: Tables, make: Callable[[dict[str, list[Row]]], str], *names: str) -> str:
    """One part per model, with a heading line where there are several."""
    models = _models(tables, *names)
    parts = [(model, make(of_model(tables, model))) for model in models]
    return "\n".join((f"**{model}**\n\n" if len(models) > 1 else "") + text for model, text in parts if text)


def _summary(tables: Tables) -> str:
    return _by_model(
        tables, lambda mine: summary_markdown(mine["quality"], mine["ruler"]), "quality", "ruler"
    )


def _overview(tables: Tables) -> str:
    """How RoLaQ was selected, then the summary."""
    chosen, summary = _section("selection", "Selection")(tables), _summary(tables)
    return "\n".join(part for part in (chosen, summary) if part)


def _pivots(table: str, across: str, value: str) -> Callable[[Tables], str]:
    """Methods by domain, length or task; one table per budget."""

    def make(mine: dict[str, list[Row]]) -> str:
        rows = mine[table]
        return "\n".join(
            f"Budget {b}\n\n{pivot_markdown(at(rows, b), across, value)}" for b in settings(rows)
        )

    return lambda tables: _by_model(tables, make, table)


def _section(table: str, title: str) -> Callable[[Tables], str]:
    return lambda tables: _by_model(tables, lambda mine: sections({table: mine[table]}).get(title, ""), table)


def _flat(table: str) -> Callable[[Tables], str]:
    """A recorded file as it is, without the columns that say how it was made."""

    def make(tables: Tables) -> str:
        rows = tables.get(table, [])
        hidden = {"commit", "command", "date", "fingerprint"}
        columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
        return markdown_table(rows, columns) if rows else ""

    return make


TABLES: dict[str, Callable[[Tables], str]] = {
    "overview": _overview,
    "summary": _summary,
    "domains": _pivots("quality", "domain", "kl"),
    "lengths": _pivots("quality", "length", "kl"),
    "ruler": _pivots("ruler", "task", "score"),
    "gain-sweep": _section("gain_sweep", "Gain sweep"),
    "selection": _section("selection", "Selection"),
    "calibration": _flat("calibration"),
    "search": _flat("search"),
    "feedback": _flat("feedback"),
    "robustness": _flat("robustness"),
    "kernels": _flat("kernels"),
    "serve": _flat("serve"),
    "tasks": _flat("tasks"),
}
