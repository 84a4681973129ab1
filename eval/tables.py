"""Tables of a result: averages over domains, lengths and tasks, one row per method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rolaq.common.files import markdown_table
from rolaq.eval.methods import METHODS
from rolaq.eval.results import Row
from rolaq.eval.ruler_config import RULER_SHORT


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean, the right one for perplexities; None of nothing."""
    average = mean(math.log(value) for value in values)
    return None if average is None else math.exp(average)


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a column, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def setting(row: Mapping[str, Any]) -> str:
    """What a row was measured under: its budget, and reading and path where they are not the usual ones."""
    usual = ("per_query", "simulated")
    more = [row[key] for key in ("reading", "through") if row.get(key) and row[key] not in usual]
    return " ".join([row["budget"], *more])


def settings(rows: Iterable[Row]) -> list[str]:
    """The settings in ``rows``, smallest budget first."""
    found = dict.fromkeys(setting(row) for row in rows)
    return sorted(found, key=lambda name: ([int(part) for part in name.split()[0].split("+")], name))


def at(rows: Iterable[Row], name: str) -> list[Row]:
    """Rows of one setting."""
    return [row for row in rows if setting(row) == name]


def label(row: Mapping[str, Any], several: bool = True) -> str:
    """A method's name in tables, with what was ablated in it, and its calibration seed where there are several."""
    name = f"{row['method']} {row['variant']}" if row.get("variant") else str(row["method"])
    return f"{name} (seed {row['seed']})" if several and row["seed"] is not None else name


def methods(rows: Sequence[Row], seeds: bool = True) -> dict[str, list[Row]]:
    """Rows by method label, in the order of `METHODS`; without ``seeds`` those of all seeds are one method's."""
    found: dict[str, set[Any]] = {}
    for row in rows:
        found.setdefault(label(row, several=False), set()).add(row["seed"])
    order = sorted(
        rows,
        key=lambda row: (list(METHODS).index(row["method"]), row.get("variant") or "", row["seed"] or 0),
    )
    result: dict[str, list[Row]] = {}
    for row in order:
        several = seeds and len(found[label(row, several=False)]) > 1
        result.setdefault(label(row, several), []).append(row)
    return result


def comparable(rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    """Per setting, the rows whose ``columns`` every method (and seed) measured there has."""
    found: dict[str, dict[Any, set[Any]]] = {}
    for row in rows:
        mine = found.setdefault(setting(row), {}).setdefault(
            (row["method"], row.get("variant"), row["seed"]), set()
        )
        mine.add(tuple(row[name] for name in columns))
    common = {name: set.intersection(*parts.values()) for name, parts in found.items()}
    return [row for row in rows if tuple(row[name] for name in columns) in common[setting(row)]]


def summary(quality: Sequence[Row], ruler: Sequence[Row]) -> list[Row]:
    """Per method: bytes a token, and per setting mean KL, perplexity (geometric) and mean RULER score.

    KL and perplexity are over the domains and lengths that all methods have in that setting.
    """
    result = []
    pairs = {id(row) for row in comparable(quality, ("domain", "length"))}
    for method, rows in methods([*quality, *ruler]).items():
        line: Row = {"method": method, "bytes": next((r["bytes_per_token"] for r in rows if "kl" in r), None)}
        for name in settings([*quality, *ruler]):
            here = at(rows, name)
            shown = [row for row in here if id(row) in pairs]
            line[f"kl {name}"] = mean(row["kl"] for row in shown)
            line[f"ppl {name}"] = geometric_mean(row["ppl"] for row in shown)
            line[f"ruler {name}"] = mean(row["score"] for row in here if "score" in row)
        result.append(line)
    return result


def summary_markdown(quality: Sequence[Row], ruler: Sequence[Row]) -> str:
    """The summary as one Markdown table; columns without any value are left out."""
    rows = summary(quality, ruler)
    names = {"kl": "KL", "ppl": "PPL", "ruler": "RULER"}
    columns = {"method": "method", "bytes": "bytes/token/layer"}
    for kind, title in names.items():
        for name in settings([*quality, *ruler]):
            if any(row[f"{kind} {name}"] is not None for row in rows):
                columns[f"{kind} {name}"] = f"{title} {name}"
    return markdown_table(rows, columns)


def pivot(
    rows: Sequence[Row], across: str, value: str, average: Callable[[Iterable[float]], Any] = mean
) -> list[Row]:
    """One row per method, one column per value of ``across``, and the mean over them."""
    names = distinct(rows, across)
    result = []
    for name, mine in methods(rows).items():
        line = {str(c): average(row[value] for row in mine if row[across] == c) for c in names}
        known = [x for x in line.values() if x is not None]
        result.append({"method": name, **line, "mean": mean(known) if len(known) == len(names) else None})
    return result


def pivot_markdown(rows: Sequence[Row], across: str, value: str) -> str:
    """`pivot` as Markdown."""
    columns = {str(name): RULER_SHORT.get(name, str(name)) for name in distinct(rows, across)}
    return markdown_table(pivot(rows, across, value), {"method": "method", **columns, "mean": "mean"})


def sections(tables: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Every table that the rows allow, as Markdown by title."""
    quality, ruler = tables.get("quality", []), tables.get("ruler", [])
    found: dict[str, str] = {}
    if quality or ruler:
        found["Summary"] = summary_markdown(quality, ruler)
    for name in settings(quality):
        found[f"KL by domain, {name}"] = pivot_markdown(at(quality, name), "domain", "kl")
        found[f"KL by length, {name}"] = pivot_markdown(at(quality, name), "length", "kl")
    for name in settings(ruler):
        found[f"RULER by task, {name}"] = pivot_markdown(at(ruler, name), "task", "score")
    if tables.get("gain_sweep"):
        columns = {"gain": "gain", "kappa": "kappa", "kl": "KL", "relative": "relative to 1.16"}
        found["Gain sweep"] = markdown_table(
            sorted(tables["gain_sweep"], key=lambda row: row["gain"]), columns
        )
    if tables.get("selection"):
        columns = {
            "method": "method",
            "seed": "seed",
            "S": "S",
            "r_short": "r short",
            "r_2k": "r middle",
            "r_4k": "r long",
            "lengths": "lengths",
            "steps": "steps",
            "tokens": "tokens",
        }
        found["Selection"] = markdown_table(tables["selection"], columns)
    return found
