"""`python -m rolaq.calib.compare FOLDER…`: runs side by side, lowest S first, with the settings that differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError, main
from rolaq.common.files import markdown_table, read_json, write_json

NUMBERS = ("S", "S_start", "best_step", "steps", "tokens", "minutes", "tokens_per_s")


def find_runs(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Summaries of all calibrations below `folders`, by the path that differs between them.

    Raises `RolaqError` when there is none.
    """
    paths = sorted(path for folder in folders for path in Path(folder).rglob("calibration*/summary.json"))
    if not paths:
        raise RolaqError(
            f"no calibration/summary.json below {', '.join(folders)}: run `make calibrate` first"
        )
    several = [path.parents[1] for path in paths]
    return {
        str(path.parent if several.count(path.parents[1]) > 1 else path.parents[1]): read_json(path)
        for path in paths
    }


def rows_of(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A flat row per run, lowest S first: settings that are not the same everywhere, then the numbers."""
    settings = {name: run["settings"] for name, run in runs.items()}
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    varied = [key for key in keys if len({str(values.get(key)) for values in settings.values()}) > 1]
    rows = []
    for name, run in runs.items():
        ratios = {key: value for key, value in run.items() if key.startswith("r_")}
        shown = {
            key: settings[name].get(key) for key in varied if not key.startswith(("data.fit", "data.train"))
        }
        if "data.val" in shown:  # S on different texts does not compare
            shown["data.val"] = str(shown["data.val"])[:12]
        numbers = {key: run[key] for key in NUMBERS}
        rows.append({"run": name, "model": run["model"], **shown, **ratios, **numbers})
    return sorted(rows, key=lambda row: row["S"])


@main
def command() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders that hold calibrations, at any depth")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = rows_of(find_runs(arguments.folders))
    print(markdown_table(rows, list(dict.fromkeys(key for row in rows for key in row))))
    if arguments.json:
        write_json(arguments.json, rows)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    command()
