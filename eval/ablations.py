"""What the calibration runs of the ablations gave: S by component, objective, rotation and range; thresholds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.common.files import markdown_table, read_json
from rolaq.eval.config import METHOD
from rolaq.eval.results import Row
from rolaq.eval.tables import distinct
from rolaq.eval.task_tables import spread

ROTATIONS = {
    "full": "full exponential",
    "cayley": "Cayley",
    "joint": "H_K + H_V",
    "contrast": "H_K - H_V",
    "random": "random subspaces",
    "fixed": "fixed (OSCAR's)",
}
HALF = ("joint", "contrast", "random")  # two blocks: half the parameters of a full generator


def read_runs(artifacts: str | Path, model: str) -> tuple[list[Row], list[Row]]:
    """Rows of the runs below ``<artifacts>/<model>/runs``: one per run, and one per run and layer.

    Raises:
        RolaqError: a summary that another version wrote.
    """
    runs, layers = [], []
    for path in sorted((Path(artifacts) / model / "runs").glob("*/*/calibration/summary.json")):
        summary = read_json(path)
        try:
            row = _run_row(summary, path.parents[2].name)
            thresholds = zip(summary["threshold"], summary["gain"], strict=True)
        except (KeyError, TypeError) as error:
            raise RolaqError(f"{path} is from another version of RoLaQ: calibrate again") from error
        runs.append(row)
        about = {key: row[key] for key in ("model", "kind", "seed")}
        layers += [
            {**about, "layer": layer, "threshold": t, "gain": g} for layer, (t, g) in enumerate(thresholds)
        ]
    return runs, layers


def _run_row(summary: Mapping[str, Any], kind: str) -> Row:
    settings = summary["settings"]
    made = summary.get("environment", {})
    return {
        "model": summary["model"],
        "kind": kind,
        "rotation": settings["quant.rotation"],
        "threshold": settings["quant.threshold"],
        "gain_rule": settings["quant.spec.gain_rule"],
        "objective": settings["calib.objective"],
        "lr_rotation": settings["calib.lr_rotation"],
        "seed": summary["seed"],
        "S": summary["S"],
        **{key: value for key, value in summary.items() if key.startswith("r_")},
        "mean_threshold": statistics.mean(summary["threshold"]),
        "steps": summary["steps"],
        "best_step": summary["best_step"],
        "tokens": summary["tokens"],
        "commit": made.get("commit"),
        "gpu": made.get("device"),
        "command": _command(summary["model"], summary["seed"], settings),
    }


def _command(model: str, seed: int, settings: Mapping[str, Any]) -> str:
    """The single calibration that repeats a run, on the same text."""
    varied = (
        "quant.rotation",
        "quant.threshold",
        "quant.spec.gain_rule",
        "calib.objective",
        "calib.lr_rotation",
    )
    values = " ".join(f"{key}={settings[key]}" for key in varied)
    return f"python -m rolaq.calib calib=full model={model} seed={seed} {values}"


def by_kind(rows: Iterable[Row], kinds: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of each kind that there is, in the order of ``kinds``."""
    found = [row for row in rows if row["kind"] in kinds]
    return {kind: mine for kind in kinds if (mine := [row for row in found if row["kind"] == kind])}


def _table(rows: Sequence[Row], kinds: Mapping[str, Row], accuracy: Mapping[str, str | None]) -> str:
    """One line per kind: its description, S as mean ± sample deviation, seeds, and the six-task mean."""
    lines = []
    for kind, mine in by_kind(rows, list(kinds)).items():
        numbers = {
            "S": spread([row["S"] for row in mine], digits=3),
            "seeds": len(mine),
            "tasks": accuracy.get(kind),
        }
        lines.append({**kinds[kind], **numbers})
    if not lines:
        return ""
    columns = {
        **{key: key for key in next(iter(kinds.values()))},
        "S": "S (lower is better)",
        "seeds": "seeds",
    }
    return markdown_table(lines, {**columns, **({"tasks": "mean of the tasks, %"} if accuracy else {})})


def components(rows: Sequence[Row], accuracy: Mapping[str, str | None]) -> str:
    """Table 3a: rotation, threshold, both."""
    kinds = {
        "joint-fixed-coupled-both": {"rotation": "learned", "range": "fixed"},
        "fixed-learned-coupled-both": {"rotation": "fixed", "range": "learned"},
        METHOD: {"rotation": "learned", "range": "learned"},
    }
    return _table(rows, kinds, accuracy)


def objectives(rows: Sequence[Row], accuracy: Mapping[str, str | None]) -> str:
    """Table 3b: KL, attention output, both."""
    names = {"kl": "prediction KL", "attn": "attention output", "both": "both"}
    kinds: dict[str, Row] = {
        f"joint-learned-coupled-{key}": {"objective": name} for key, name in names.items()
    }
    return _table(rows, kinds, accuracy)


def rotations(rows: Sequence[Row], accuracy: Mapping[str, str | None], latent_dim: int | None) -> str:
    """Table 4: the search spaces, with their rotation parameters per layer."""
    kinds: dict[str, Row] = {}
    for key in ("full", "cayley", "joint", "contrast", "random"):
        parameters = "d²/2" if key in HALF else "d²"
        if latent_dim:
            parameters = str(latent_dim**2 // (2 if key in HALF else 1))
        kinds[f"{key}-learned-coupled-both"] = {"rotation": ROTATIONS[key], "parameters": parameters}
    return _table(rows, kinds, accuracy)


def ranges(rows: Sequence[Row]) -> str:
    """Table 12: gain free or coupled to the threshold."""
    kinds = {"joint-learned-free-both": {"gain": "free"}, METHOD: {"gain": "coupled, 1/C(T)"}}
    return _table(rows, kinds, {})


def thresholds(layers: Sequence[Row]) -> str:
    """Figure 8 as a table: mean threshold over layers, by kind and seed."""
    coupled = [row for row in layers if "-learned-coupled-" in row["kind"]]
    lines = []
    for kind in distinct(coupled, "kind"):
        mine = [row for row in coupled if row["kind"] == kind]
        line: Row = {"run": kind}
        for seed in sorted(distinct(mine, "seed")):
            line[str(seed)] = statistics.mean(row["threshold"] for row in mine if row["seed"] == seed)
        lines.append(line)
    names = [str(seed) for seed in sorted(distinct(coupled, "seed"))]
    return (
        markdown_table(lines, {"run": "mean T over layers", **{s: f"seed {s}" for s in names}})
        if lines
        else ""
    )
