import pytest
import wandb

from rolaq.common.config import TrackingConfig
from rolaq.common.tracking import Tracker, WandbTracker, folder_hash, tracker


def exercise(run, folder):
    run.log({"loss": 1.0}, step=1)
    run.table("layers", [{"layer": 0, "T": 0.9}, {"layer": 1, "g": 1.1}])
    run.artifact("rolaq-tiny", "calibration", folder)
    run.use_artifact("oscar-tiny", "calibration", folder)
    run.finish()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "a.txt").write_text("x")
    return tmp_path / "artifact"


def test_none_does_nothing(folder, capsys):
    run = tracker(TrackingConfig(mode="none"), "calibrate", {})
    assert type(run) is Tracker
    exercise(run, folder)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_offline_keeps_files_and_prints_the_sync_command(tmp_path, folder, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tracker(TrackingConfig(mode="offline", tags=["t"]), "calibrate", {"seed": 42}, str(tmp_path))
    assert isinstance(run, WandbTracker)
    assert run.run.config["seed"] == 42
    exercise(run, folder)
    out = capsys.readouterr()
    assert "tracking: wandb sync wandb/offline-run-" in out.out
    assert "warning" not in out.err
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_failing_start_costs_only_a_warning(folder, capsys, monkeypatch):
    def init(**_):
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", init)
    exercise(tracker(TrackingConfig(mode="wandb"), "eval", {}), folder)
    assert capsys.readouterr().err == "warning: tracking stopped, the run goes on: no network\n"


def test_a_failing_call_ends_the_tracking_with_one_warning(tmp_path, folder, capsys):
    class Broken:
        dir = str(tmp_path)

        def log(self, *_, **__):
            raise RuntimeError("disk full")

    exercise(WandbTracker(Broken(), offline=True), folder)
    out = capsys.readouterr()
    assert out.err == "warning: tracking stopped, the run goes on: disk full\n"
    assert out.out == ""


def test_folder_hash_sees_names_and_contents(tmp_path, folder):
    before = folder_hash(folder)
    (folder / "a.txt").rename(folder / "b.txt")
    renamed = folder_hash(folder)
    (folder / "b.txt").write_text("y")
    assert len({before, renamed, folder_hash(folder)}) == 3
