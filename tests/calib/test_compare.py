"""The table of runs."""

import json
import sys

import pytest

from rolaq.calib.compare import command


def summary(folder, **changes):
    path = folder / "calibration"
    path.mkdir(parents=True)
    base = dict(model="toy", S=0.7, S_start=0.9, r_512=0.7, best_step=5, steps=5, tokens=10, minutes=1.0)
    settings = {"seed": 42, "calib.lr_rotation": changes.pop("lr", 1e-3), "data.fit": changes.pop("fit", "a")}
    text = json.dumps(base | {"tokens_per_s": 3.0, "settings": settings} | changes)
    (path / "summary.json").write_text(text)


def test_rows_are_sorted_and_show_what_differs(tmp_path, monkeypatch, capsys):
    summary(tmp_path / "a", S=0.8, lr=1e-3)
    summary(tmp_path / "b", S=0.6, lr=2e-3, fit="b")
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path), "--json", str(tmp_path / "rows.json")])
    command()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["S"] for row in rows] == [0.6, 0.8]
    assert [row["calib.lr_rotation"] for row in rows] == [2e-3, 1e-3]
    assert not {"seed", "data.fit"} & set(rows[0])
    assert "| calib.lr_rotation |" in capsys.readouterr().out


def test_no_runs_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        command()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: no calibration/summary.json")
