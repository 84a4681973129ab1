"""Tables in Markdown pages, made from the recorded results between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rolaq.common.errors import lookup
from rolaq.common.files import atomic_write, markdown_table
from rolaq.eval.experiment_sections import SECTIONS
from rolaq.eval.material import Material, Source, of_model
from rolaq.eval.results import Row
from rolaq.eval.tables import at, distinct, pivot_markdown, sections, settings, summary_markdown

Tables = Mapping[str, Sequence[Row]]

EXPERIMENTS = {make.__name__: make for make in SECTIONS}
MARKED = re.compile(r"(<!-- results:start ?([\w-]*) *-->\n).*?(<!-- results:end -->)", re.DOTALL)


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
        hidden = {"commit", "command", "date", "fingerprint", "items", "correct"}
        columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
        return markdown_table(rows, columns) if rows else ""

    return make


def _experiment(name: str) -> Callable[[Tables], str]:
    """The tables of an experiment, each below its caption."""

    def make(tables: Tables) -> str:
        parts = []
        for model in _models(tables, "tasks", "ablations", "gain_sweep", "kappa_sweep", "ruler"):
            material = Material(model, [Source("recorded", of_model(tables, model))])
            with TemporaryDirectory() as folder:  # the figures go elsewhere
                section = EXPERIMENTS[name](material, Path(folder))
            shown = {title: text for title, text in section.tables.items() if text}
            parts += [f"**{title}**\n\n{text}" for title, text in shown.items()]
        return "\n".join(parts)

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
    "speed": _flat("speed"),
    "agreement": _flat("agreement"),
    **{f"{name}": _experiment(name) for name in EXPERIMENTS},
}
