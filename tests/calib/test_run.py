"""Whole calibrations: artifacts, resuming, repeating, refusing, and the command itself."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from rolaq.calib import outputs, run, trainer
from rolaq.calib.capture import output_head
from rolaq.calib.checkpoint import RunState, check_identity, load_state, save_state
from rolaq.calib.loop import CalibrationLoop
from rolaq.calib.trainer import Trainer
from rolaq.common.errors import RolaqError
from rolaq.common.tracking import Tracker
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.artifact import Artifact

ROOT = Path(__file__).parents[2]


def calibrate(overrides, *more):
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        run.main(compose("calibrate", [*overrides, *more]))


def lines(folder):
    return [json.loads(line) for line in (folder / "calibration/history.jsonl").read_text().splitlines()]


def interrupt_at(monkeypatch, step):
    """Stop the run as Ctrl-C would, in the middle of a step."""
    original = Trainer.step

    def stop(self, ids, index):
        if index == step:
            raise KeyboardInterrupt
        return original(self, ids, index)

    monkeypatch.setattr(Trainer, "step", stop)


@pytest.fixture(scope="module")
def unbroken(overrides, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "unbroken"
    calibrate(overrides, f"folder={folder}")
    return folder


@pytest.fixture
def without_figures(monkeypatch):
    """Drawing takes longer than these calibrations."""
    monkeypatch.setattr(outputs, "draw", lambda *args: [])


@pytest.fixture
def finished(unbroken, tmp_path):
    """A copy of a finished run, to change."""
    return shutil.copytree(unbroken, tmp_path / "finished")


def test_artifacts_history_and_summary(unbroken):
    oscar, rolaq = (Artifact.load(unbroken / name) for name in ("oscar", "rolaq"))
    assert oscar.config.gain == pytest.approx([1.16, 1.16])
    assert rolaq.rotation.shape == (2, 128, 128)
    history, summary = lines(unbroken), json.loads((unbroken / "calibration/summary.json").read_text())
    steps, checks = ([e for e in history if e["kind"] == kind] for kind in ("step", "validation"))
    assert [e["step"] for e in steps] == [0, 1, 2, 3, 4]
    assert [e["step"] for e in checks] == [0, 2, 4, 5]
    best = min(checks, key=lambda e: e["S"])
    assert summary["S"] == best["S"] == rolaq.config.selection["S"]
    assert summary["best_step"] == best["step"]
    parts = 0.5 * best["r_32"] + 0.25 * best["r_64"] + 0.25 * best["r_128"]
    assert best["S"] == pytest.approx(parts)
    assert summary["r_32"] == pytest.approx(summary["kl_32"] / summary["oscar_kl"]["32"])
    assert summary["threshold"] == rolaq.config.threshold
    assert summary["tokens"] == rolaq.config.tokens == 5 * 128
    assert summary["tokens_per_s"] > 0
    assert summary["peak_memory"]["gb"] > 0.05
    assert rolaq.config.data["train"]["fingerprint"] == summary["data"]["train"]["fingerprint"]
    assert f"{summary['S']:.4f}" in (unbroken / "rolaq/README.md").read_text()
    for name in ("training", "thresholds", "energy", "attention_error"):
        assert (unbroken / f"rolaq/figures/{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("step", [1, 4])
def test_a_stopped_run_goes_on_to_the_same_bits(overrides, unbroken, tmp_path, monkeypatch, step):
    again = f"folder={tmp_path}/stopped"
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            calibrate(overrides, again)
    assert load_state(tmp_path / "stopped/calibration/state.pt").step == {1: 0, 4: 4}[step]
    assert not (tmp_path / "stopped/rolaq").exists()
    calibrate(overrides, again)
    for name in ("rolaq.safetensors", "history.jsonl"):
        assert (tmp_path / "stopped/rolaq" / name).read_bytes() == (unbroken / "rolaq" / name).read_bytes()


def test_a_finished_run_is_recognised(overrides, finished, monkeypatch, capsys):
    before = (finished / "rolaq/rolaq_config.json").stat().st_mtime_ns
    interrupt_at(monkeypatch, 0)  # no step may run
    calibrate(overrides, f"folder={finished}")
    assert "nothing to do" in capsys.readouterr().out
    assert (finished / "rolaq/rolaq_config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("calib.steps=6", "calib.steps=5, this one has calib.steps=6; overwrite=true starts afresh"),
        ("quant=full", "quant.rotation=joint, this one has quant.rotation=full"),
        ("seed=43", "seed=42, this one has seed=43"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(overrides, finished, change, message):
    with pytest.raises(RolaqError, match=message):
        calibrate(overrides, f"folder={finished}", change)


@pytest.mark.usefixtures("without_figures")
def test_overwriting_starts_afresh(overrides, finished):
    calibrate(overrides, f"folder={finished}", "seed=43", "calib.steps=1", "overwrite=true")
    assert Artifact.load(finished / "rolaq").config.seed == 43


@pytest.mark.usefixtures("without_figures")
def test_a_lost_artifact_is_exported_again_without_training(overrides, finished, unbroken, monkeypatch):
    interrupt_at(monkeypatch, 0)
    (finished / "rolaq/rolaq.safetensors").write_bytes(b"damaged")
    calibrate(overrides, f"folder={finished}")
    assert Artifact.load(finished / "rolaq").id == Artifact.load(unbroken / "rolaq").id


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "learning_rate", lambda step, *rest: 1e18 if step >= 2 else 1e-3)
    with pytest.raises(
        RolaqError, match=r"loss is nan at step 3: the state after step 2 is kept in .*state.pt"
    ):
        calibrate(overrides, f"folder={tmp_path}")
    state = load_state(tmp_path / "calibration/state.pt")
    assert state.step == 2
    assert all(torch.isfinite(tensor).all() for tensor in state.student.values())
    assert math.isfinite(state.best.score)
    assert not (tmp_path / "rolaq").exists()


def test_selection_keeps_the_lowest_score(model, make_student, make_config, tmp_path):
    """Scores are made up; the kept student must be the one of the lowest."""

    class Scores:
        values = iter([1.0, 0.5, 0.7])

        def kl(self, method):
            value = next(self.values)
            return dict.fromkeys((32, 64, 128), value)

    student, config = make_student(), make_config(steps=4)
    steps = Trainer(model, find_mla_layers(model), student, output_head(model), config)
    batches = [torch.randint(1, 4000, (2, 64)) for _ in range(4)]
    state = RunState({}, reference=dict.fromkeys((32, 64, 128), 1.0))
    CalibrationLoop(steps, Scores(), batches, state, tmp_path / "state.pt", Tracker()).run()
    assert (state.best.step, state.best.score) == (2, 0.5)
    assert not torch.equal(state.best.student["threshold"], student.threshold)
    assert torch.equal(state.student["threshold"], student.threshold)


def test_damaged_state_is_named(tmp_path):
    path = tmp_path / "state.pt"
    assert load_state(path) is None
    save_state(path, RunState({"a": 1}))
    assert load_state(path).identity == {"a": 1}
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RolaqError, match="it is damaged"):
        load_state(path)
    path.write_bytes(content[:100])
    with pytest.raises(RolaqError, match=r"state.pt cannot be resumed .* overwrite=true starts afresh"):
        load_state(path)


def test_identity_names_the_first_difference():
    check_identity({"a": 1, "b": [2]}, {"a": 1, "b": [2]}, "here")
    with pytest.raises(RolaqError, match="here holds a run with b=2, this one has b=None"):
        check_identity({"a": 1, "b": 2}, {"a": 1}, "here")


KILLED = """
import os, signal, sys
from hydra import compose, initialize_config_module
from rolaq.calib import run, trainer

step = trainer.Trainer.step
trainer.Trainer.step = lambda self, ids, i: os.kill(os.getpid(), signal.SIGKILL) if i == 3 else step(self, ids, i)
with initialize_config_module("rolaq.conf", version_base="1.3"):
    run.main(compose("calibrate", sys.argv[1:]))
"""


@pytest.mark.usefixtures("without_figures")
def test_a_killed_process_leaves_a_state_to_go_on_from(overrides, unbroken, tmp_path):
    arguments = [*overrides, f"folder={tmp_path}", f"threads={torch.get_num_threads()}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert load_state(tmp_path / "calibration/state.pt").step == 2
    calibrate(arguments)
    for name in ("rolaq.safetensors", "history.jsonl"):
        assert (tmp_path / "rolaq" / name).read_bytes() == (unbroken / "rolaq" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("quant.rotation=jont", "Unknown quant.rotation 'jont'. Did you mean: joint"),
        ("quant.spec.threshold_max=0.9", r"threshold_init 0.98\d+ must lie in \[0.5, 0.9\]"),
        ("quant.spec.threshold_min=-1", "quant.spec.threshold_min=-1: .*greater than 0"),
        ("quant.spec.group_size=96", "latent dimension 128 of .* is not a multiple of the group size 96"),
        ("calib.objective=mse", "calib.objective='mse': .*'kl', 'attn' or 'both'"),
        ("calib.lengths=[32,64,256]", "calib: .*tokens_per_step 128 is not a multiple of the length 256"),
        ("calib.steps=100000", "too little training text: more than [0-9]+ tokens needed, [0-9]+ available"),
        ("quant={rotation: fixed, threshold: fixed}", "nothing to learn"),
    ],
)
def test_mistakes_are_one_line(overrides, tmp_path, change, message):
    with pytest.raises(RolaqError, match=message) as error:
        calibrate(overrides, f"folder={tmp_path}", change)
    assert "\n" not in str(error.value)


def command(overrides):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, "-m", "rolaq.calib", *overrides, f"hydra.run.dir={overrides[-1][7:]}/hydra"]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment)


def test_the_command_writes_both_artifacts(overrides, tmp_path):
    result = command([*overrides, "threads=1", "calib.steps=2", f"folder={tmp_path}"])
    assert result.returncode == 0, result.stderr
    for name in ("oscar", "rolaq"):
        assert Artifact.load(tmp_path / name).config.method == name
    assert "| rolaq |" in result.stdout
    assert "tokens/s" in result.stdout


def test_the_command_says_what_is_wrong_in_one_line(overrides, tmp_path):
    result = command([*overrides, "quant.rotation=jont", f"folder={tmp_path}"])
    assert result.returncode == 1
    assert (
        result.stderr.strip()
        .splitlines()[-1]
        .startswith("error: Unknown quant.rotation 'jont'. Did you mean: joint")
    )
    assert "Traceback" not in result.stderr
