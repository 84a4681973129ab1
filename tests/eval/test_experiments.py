"""The experiments: their commands, their configs, the rows and tables of their runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.eval import ablations
from rolaq.eval.config import METHOD
from rolaq.eval.experiment_sections import SECTIONS
from rolaq.eval.experiments import CALIBRATE, EVALUATE, EXPERIMENTS, REPORT, check, steps_of
from rolaq.eval.material import Material, Source, gather, profile_of, profile_rows
from rolaq.eval.paired import packed
from rolaq.eval.report import ReportConfig, build
from rolaq.eval.task_tables import averaged, comparable_tasks, paired, stamp_of

CONF = Path(__file__).parents[2] / "conf" / "experiment"


def composed(command, *overrides):
    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        return compose(command, list(overrides), return_hydra_config=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_names_its_command_and_its_steps_compose(name):
    assert f"make experiment NAME={name} " in (CONF / f"{name}.yaml").read_text().split("\n")[1]
    for step in EXPERIMENTS[name]:
        command = {"rolaq.calib": "calibrate", "rolaq.eval": "eval"}[step.module]
        cfg = composed(command, *step.overrides)
        sweeps = cfg.hydra.mode is not None and cfg.hydra.mode.name == "MULTIRUN"
        assert sweeps == step.sweep


def test_each_section_of_the_report_has_an_experiment():
    assert {make.__name__ for make in SECTIONS} == set(EXPERIMENTS)


def test_runs_of_different_tables_are_shared():
    """A calibration is found where another experiment put it."""
    folders = {}
    for name, more in (
        ("seeds", ()),
        ("components", ("quant=rolaq",)),
        ("rotations", ("quant=rolaq",)),
        ("ranges", ()),
    ):
        folders[name] = composed("calibrate", f"experiment={name}", *more).folder
    assert set(folders.values()) == {f"artifacts/tiny/runs/{METHOD}/42"}
    cfg = composed("eval", "experiment=table1", f"calibration={METHOD}/42")
    assert cfg.artifact == folders["seeds"]


def test_cayley_takes_half_the_learning_rate():
    rates = {
        kind: composed("calibrate", "experiment=rotations", f"quant={kind}").calib.lr_rotation
        for kind in ("full", "cayley")
    }
    assert rates == {"full": 2e-3, "cayley": 1e-3}


def test_all_experiments_run_each_step_once_calibrations_first():
    steps = steps_of("all")
    assert len(steps) == len(set(steps)) and set(steps) == {
        step for own in EXPERIMENTS.values() for step in own
    }
    modules = [step.module for step in steps]
    assert modules == sorted(modules, key=lambda module: module != CALIBRATE)


def test_steps_take_the_arguments_that_concern_them():
    arguments = ["model=tiny", "calib.steps=3", "suite.benchmarks.limit=5", "data=local"]
    commands = {step.module: step.command(arguments)[3:] for step in EXPERIMENTS["table1"]}
    assert commands[CALIBRATE][1:] == ["experiment=seeds", "model=tiny", "calib.steps=3", "data=local"]
    assert commands[EVALUATE][1:] == [
        "experiment=table1",
        "model=tiny",
        "suite.benchmarks.limit=5",
        "data=local",
    ]
    assert REPORT not in commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output=x"], "Unknown setting of an experiment 'output'"),
        (["quick"], "cannot read the argument 'quick': write key=value"),
    ],
)
def test_arguments_that_no_step_takes(arguments, message):
    with pytest.raises(RolaqError, match=message):
        check(arguments)


@pytest.mark.parametrize("arguments", [[], ["table9"], ["model=tiny"]])
def test_unknown_experiments_are_one_line(arguments):
    command = [sys.executable, "-m", "rolaq.eval.experiments", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(CONF.parents[1] / "src")}
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "table1" in done.stderr
    assert done.stderr.count("\n") == 1


def summary(kind, seed, s):
    rotation, threshold, rule, objective = kind.split("-")
    settings = {
        "quant.rotation": rotation, "quant.threshold": threshold, "quant.spec.gain_rule": rule,
        "calib.objective": objective, "calib.lr_rotation": 0.002,
    }  # fmt: skip
    numbers = {
        "model": "m",
        "seed": seed,
        "S": s,
        "r_512": s,
        "steps": 350,
        "best_step": 325,
        "tokens": 1433600,
    }
    made = {"commit": "c", "device": "d"}
    return {**numbers, "threshold": [0.9, 1.0], "gain": [1.1, 1.1], "settings": settings, "environment": made}


@pytest.fixture
def artifacts(tmp_path):
    """Two seeds of the method, one of three ablated kinds."""
    kinds = {
        METHOD: (0.57, 0.59),
        "full-learned-coupled-both": (0.55,),
        "joint-learned-free-both": (0.7,),
        "joint-fixed-coupled-both": (0.6,),
    }
    for kind, scores in kinds.items():
        for seed, s in zip((42, 43), scores, strict=False):
            path = tmp_path / "m" / "runs" / kind / str(seed) / "calibration" / "summary.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(summary(kind, seed, s)))
    return tmp_path


def test_tables_of_the_runs(artifacts):
    runs, layers = ablations.read_runs(artifacts, "m")
    assert len(runs) == 5 and len(layers) == 10
    assert "| full exponential | 65536 | 0.550 | 1 |" in ablations.rotations(runs, {}, 256)
    assert "| H_K + H_V | 32768 | 0.580 ± 0.014 | 2 |" in ablations.rotations(runs, {}, 256)
    assert "| free | 0.700 | 1 |" in ablations.ranges(runs)
    assert "| learned | fixed | 0.600 | 1 | 3.50 |" in ablations.components(
        runs, {"joint-fixed-coupled-both": "3.50"}
    )
    assert ablations.objectives([], {}) == ""
    assert "| joint-learned-coupled-both | 0.95 | 0.95 |" in ablations.thresholds(layers)


def test_summary_of_another_version_is_refused(artifacts):
    path = artifacts / "m" / "runs" / METHOD / "42" / "calibration" / "summary.json"
    path.write_text('{"model": "m"}')
    with pytest.raises(RolaqError, match="summary.json is from another version of RoLaQ"):
        ablations.read_runs(artifacts, "m")


def row(method, correct, seed=None, task="gsm8k", items="a", limit=None, **more):
    n = len(correct)
    return {
        "model": "m", "method": method, "seed": seed, "budget": "0+0", "reading": "per_query", "through": "simulated",
        "task": task, "shots": 8, "metric": "x", "limit": limit, "score": 100 * sum(correct) / n, "n": n,
        "items": items, "correct": packed(correct), **more,
    }  # fmt: skip


ROWS = [
    row("bf16", [True] * 4),
    row("oscar", [True, False, False, False]),
    row("rolaq", [True, True, True, False], 42),
    row("rolaq", [True, True, False, False], 43),
]


def test_seeds_are_averaged_with_their_deviation():
    lines = {line["method"]: line for line in averaged(ROWS)}
    assert lines["bf16"]["gsm8k"] == "100.00"
    assert lines["rolaq"]["gsm8k"] == lines["rolaq"]["mean"] == "62.50 ± 17.68"


def test_paired_tests_take_the_first_seed_and_the_same_items():
    lines = {(line["against"], line["task"]): line for line in paired(ROWS)}
    assert lines["oscar", "all"]["only rolaq"] == 2 and lines["oscar", "all"]["only the other"] == 0
    assert lines["oscar", "gsm8k"]["p"] == 0.5 and lines["bf16", "all"]["only the other"] == 1
    assert not paired([*ROWS[2:], row("rtn", [True] * 4, items="b")])


def test_only_one_set_of_items_is_shown_and_its_limit_stamped():
    limited = [row("bf16", [True], items="b", limit=1), row("oscar", [True], items="b", limit=1)]
    assert comparable_tasks([*ROWS, *limited]) == ROWS
    assert comparable_tasks([ROWS[0], *limited]) == limited
    assert stamp_of(ROWS) == "" and stamp_of(limited) == "LIMITED in 1 of 1 tasks, 5 of 6 missing"


def test_energy_profile_survives_being_recorded():
    profile = {"key": {"mean": [0.5, 0.8, 1.0], "std": [0.1, 0.1, 0.0]}}
    assert profile_of(profile_rows("m", profile)) == {"key": {**profile["key"], "rank": [1, 2, 3]}}
    assert profile_of([]) is None


def test_report_shows_what_is_there_and_says_what_is_missing(artifacts, tmp_path):
    cfg = ReportConfig(
        model=ModelConfig(name="m", path="m"),
        output=str(tmp_path / "o"),
        artifacts=str(artifacts),
        docs=str(tmp_path / "d"),
    )
    (tmp_path / "d" / "results").mkdir(parents=True)
    (tmp_path / "d" / "results" / "tasks.json").write_text(json.dumps(ROWS))
    page, figures = build(cfg, [])
    assert "Six tasks (Tables 1 and 8 to 11)" in page and "62.50 ± 17.68" in page and "McNemar" in page
    assert "Threshold by layer" in figures and figures["Threshold by layer"].is_file()
    missing = page[page.index("What is missing") :]
    assert "make experiment NAME=figure4 MODEL=m" in missing and "NAME=table1" not in missing
    assert "Objectives (b)" not in missing and "make bench" in missing


def test_numbers_of_different_sources_are_not_mixed():
    first, second = (Source(name, {"tasks": [row(name, [True])]}) for name in ("bf16", "rtn"))
    assert [r["method"] for r in Material("m", [first, second]).rows("tasks")] == ["bf16"]
    assert gather("m", [], "nowhere", Path("nowhere")).rows("tasks") == []
