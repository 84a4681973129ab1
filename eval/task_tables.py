"""Tables of the six benchmarks: by method and seed, and RoLaQ against each baseline on the same items."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rolaq.common.files import markdown_table
from rolaq.eval.benchmarks import BENCHMARKS
from rolaq.eval.paired import disagreements, mcnemar, unpacked
from rolaq.eval.results import Row
from rolaq.eval.ruler_config import RULER_SHORT
from rolaq.eval.tables import at, distinct, mean, methods, settings

OURS = "rolaq"


def comparable_tasks(rows: Sequence[Row]) -> list[Row]:
    """Of each task the rows on one set of items: the set that most methods have, the larger of two.

    A task that fewer than half of the methods have there (a run that was stopped) is left out.
    """
    everyone, kept = len({_who(row) for row in rows}), []
    for task in distinct(rows, "task"):
        mine = [row for row in rows if row["task"] == task]
        count = Counter(row["items"] for row in mine)
        chosen = max(mine, key=lambda row: (count[row["items"]], row["n"]))["items"]
        same = [row for row in mine if row["items"] == chosen]
        kept += same if 2 * len({_who(row) for row in same}) >= everyone else []
    return kept


def _who(row: Row) -> tuple[str, str | None, int | None]:
    return row["method"], row.get("variant"), row["seed"]


def stamp_of(rows: Iterable[Row]) -> str:
    """A caption's warning that not all items were run; empty when every task is complete. Columns say how many."""
    limited = {row["task"]: bool(row["limit"]) for row in rows}
    if not any(limited.values()):
        return ""
    missing = len(BENCHMARKS) - len(limited)
    more = f", {missing} of {len(BENCHMARKS)} missing" if missing else ""
    return f"LIMITED in {sum(limited.values())} of {len(limited)} tasks{more}"


def task_names(rows: Sequence[Row]) -> dict[str, str]:
    """The benchmarks among the rows in their usual order, with titles; a limit is stamped on each."""
    there = {row["task"]: row for row in rows}
    return {
        name: f"{item.title} (first {there[name]['n']})" if there[name]["limit"] else item.title
        for name, item in BENCHMARKS.items()
        if name in there
    }


def averaged(rows: Sequence[Row]) -> list[Row]:
    """Per method: each task's score, several seeds as mean ± sample deviation, and the mean over tasks.

    The deviation of the mean over tasks is that of the seeds' own means (paper, Appendix C.1).
    """
    names = task_names(rows)
    result = []
    for label, mine in methods(rows, seeds=False).items():
        by_seed = [[row for row in mine if row["seed"] == seed] for seed in distinct(mine, "seed")]
        line: Row = {"method": label}
        for name in names:
            line[name] = spread([row["score"] for row in mine if row["task"] == name])
        means = [mean(row["score"] for row in own) for own in by_seed if len(own) == len(names)]
        line["mean"] = spread([value for value in means if value is not None])
        result.append(line)
    return result


def spread(values: Sequence[float], digits: int = 2) -> str | None:
    """``46.71``, or ``46.71 ± 0.12`` (mean and sample deviation) of several; None of nothing."""
    if not values:
        return None
    average = f"{statistics.mean(values):.{digits}f}"
    return f"{average} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else average


def averaged_markdown(rows: Sequence[Row]) -> str:
    """`averaged` as Markdown (Tables 1 and 8)."""
    return markdown_table(averaged(rows), {"method": "method", **task_names(rows), "mean": "mean"})


def seeds_markdown(rows: Sequence[Row]) -> str:
    """A row per seed of RoLaQ (Tables 9 to 11)."""
    mine = [row for row in rows if row["method"] == OURS and not row.get("variant")]
    if not mine:
        return ""
    names = task_names(rows)
    lines = []
    for seed in distinct(mine, "seed"):
        scores = {row["task"]: row["score"] for row in mine if row["seed"] == seed}
        lines.append({"seed": seed, **scores, "mean": mean(scores.values())})
    return markdown_table(lines, {"seed": "seed", **names, "mean": "mean"})


def task_sections(rows: Sequence[Row]) -> dict[str, str]:
    """Accuracy, seeds and paired tests of every setting, as Markdown by title; a limit is stamped on each."""
    found = {}
    for name in settings(rows):
        mine = comparable_tasks(at(rows, name))
        stamp = f" – {text}" if (text := stamp_of(mine)) else ""
        found[f"Accuracy, %, {name}{stamp}"] = averaged_markdown(mine)
        found[f"RoLaQ by seed, {name}{stamp}"] = seeds_markdown(mine)
        title = f"RoLaQ against each method, the same items, McNemar's exact test, {name}{stamp}"
        found[title] = paired_markdown(mine)
    return {title: text for title, text in found.items() if text}


def paired(rows: Sequence[Row]) -> list[Row]:
    """RoLaQ (lowest seed) against every other method: items that only one has right, and McNemar's exact p.

    All tasks together first, then one by one. Rows must hold ``items`` and ``correct``, which RULER's have
    too; only rows on the same items are compared.
    """
    ours = [row for row in rows if row["method"] == OURS and not row.get("variant") and row.get("items")]
    first = min((row["seed"] or 0 for row in ours), default=None)
    keyed = {_item_key(row): row for row in ours if (row["seed"] or 0) == first}
    result = []
    for other in (name for name in distinct(rows, "method") if name != OURS):
        theirs = {_item_key(row): row for row in rows if row["method"] == other and row.get("items")}
        counts = [(key[0], *_counts(keyed[key], theirs[key])) for key in keyed if key in theirs]
        if not counts:
            continue
        together = [sum(numbers) for numbers in list(zip(*counts, strict=True))[1:]]
        for task, n, gained, lost in [("all", *together), *counts]:
            line = {"against": other, "task": task, "n": n, "only rolaq": gained, "only the other": lost}
            result.append({**line, "p": mcnemar(gained, lost)})
    return result


def _item_key(row: Row) -> tuple[str, int | None, str]:
    return row["task"], row.get("length"), row["items"]


def _counts(ours: Row, theirs: Row) -> tuple[int, int, int]:
    n = ours["n"]
    return n, *disagreements(unpacked(ours["correct"], n), unpacked(theirs["correct"], n))


def totals_markdown(rows: Sequence[Row]) -> str:
    """Of `paired` the lines about all tasks together."""
    lines = [row for row in paired(rows) if row["task"] == "all"]
    return markdown_table(lines, ["against", "n", "only rolaq", "only the other", "p"]) if lines else ""


def paired_markdown(rows: Sequence[Row]) -> str:
    """`paired` as Markdown."""
    titles = {"all": "all", **{name: item.title for name, item in BENCHMARKS.items()}, **RULER_SHORT}
    lines = [{**row, "task": titles.get(row["task"], row["task"])} for row in paired(rows)]
    return (
        markdown_table(lines, ["against", "task", "n", "only rolaq", "only the other", "p"]) if lines else ""
    )
