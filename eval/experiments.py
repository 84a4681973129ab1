"""`python -m rolaq.eval.experiments table4 model=tiny …`: one table or figure of the paper, from start to end.

Each step is a command of its own that skips what is done: calibrations, then evaluations, then the report.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rolaq.common.errors import RolaqError, lookup, main

CALIBRATE, EVALUATE, REPORT = "rolaq.calib", "rolaq.eval", "rolaq.eval.report"
ONLY = {
    CALIBRATE: ("calib", "quant", "overwrite"),
    EVALUATE: ("suite", "protect", "methods", "backend", "server", "calibration", "artifact"),
}
SHARED = ("model", "data", "tracking", "seed", "threads", "hydra", "debug")


@dataclass(frozen=True)
class Step:
    """A command with its overrides; ``sweep`` runs all of the experiment's combinations."""

    module: str
    overrides: tuple[str, ...]
    sweep: bool = True

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line with those of the user's arguments that concern it, which come last and win."""
        others = [key for module, keys in ONLY.items() if module != self.module for key in keys]
        mine = [text for text in arguments if _key(text) not in others]
        if self.module == REPORT:
            mine = [text for text in arguments if _key(text) == "model"]
        return [sys.executable, "-m", self.module, *(["-m"] if self.sweep else []), *self.overrides, *mine]


def _calibrate(name: str, *more: str) -> Step:
    return Step(CALIBRATE, (f"experiment={name}", *more))


def _evaluate(name: str, sweep: bool = True) -> Step:
    return Step(EVALUATE, (f"experiment={name}",), sweep)


EXPERIMENTS = {
    "table1": [_calibrate("seeds"), _evaluate("table1")],
    "table2": [_calibrate("seeds"), _evaluate("table2")],
    "table3": [_calibrate("components"), _calibrate("objectives"), _evaluate("table3")],
    "table4": [_calibrate("rotations"), _calibrate("ranges"), _evaluate("table4")],
    "figure2": [_calibrate("seeds", "seed=42"), _evaluate("figure2", sweep=False)],
    "figure4": [_calibrate("rotations", "quant=full", "seed=42"), _evaluate("figure4", sweep=False)],
    "figure5": [_calibrate("seeds"), _evaluate("figure5")],
    "figure7": [_evaluate("figure7", sweep=False)],
    "figure8": [_calibrate("figure8")],
}


ALL = "all"


def steps_of(name: str) -> list[Step]:
    """The steps of an experiment, or of all of them, each once: calibrations first.

    Raises:
        RolaqError: no such experiment.
    """
    if name != ALL:
        return lookup("experiment", name, {**EXPERIMENTS, ALL: []})
    steps = dict.fromkeys(step for own in EXPERIMENTS.values() for step in own)
    return sorted(steps, key=lambda step: step.module != CALIBRATE)


def _key(override: str) -> str:
    """``suite`` of ``+suite.ruler.samples=5``."""
    return override.lstrip("+~").split("=")[0].split(".")[0].split("@")[0]


def check(arguments: Sequence[str]) -> None:
    """Raise `RolaqError` for an argument that no step, or not every step, could take."""
    known = {key: key for key in (*SHARED, *(key for keys in ONLY.values() for key in keys))}
    for text in arguments:
        if "=" not in text:
            raise RolaqError(f"cannot read the argument {text!r}: write key=value")
        lookup("setting of an experiment", _key(text), known)


@main
def command() -> None:
    """Run the steps of one experiment; the first that fails ends it."""
    names, arguments = sys.argv[1:2], sys.argv[2:]
    if not names or "=" in names[0]:  # make without NAME
        raise RolaqError(f"which experiment? One of {', '.join(EXPERIMENTS)}, or {ALL}")
    steps = steps_of(names[0])
    check(arguments)
    for number, step in enumerate([*steps, Step(REPORT, (), sweep=False)], start=1):
        line = step.command(arguments)
        print(f"[{number}/{len(steps) + 1}] python {shlex.join(line[1:])}", flush=True)
        done = subprocess.run(line)
        if done.returncode:
            raise RolaqError(
                f"step {number} of {names[0]} ended with {done.returncode}: see above; run it again to go on"
            )


if __name__ == "__main__":
    command()
