"""`python -m rolaq.eval` and `rolaq.eval.report` as commands, on a random model and a miniature suite."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from rolaq.common.errors import RolaqError
from rolaq.eval.__main__ import run as evaluate

SOURCE = Path(__file__).parents[2] / "src"
MINIATURE = [
    "model=auto", "model.path=model", "data=local", "data.root=data", "data.val=[data/val.jsonl]",
    "data.test=[data/test.jsonl]", "tracking=none", "threads=1", "suite.gain_sweep.length=64",
    'protect.budgets=["0+0","4+16"]',
    'suite.divergence.passes=[{budgets: ["0+0"], lengths: [48, 96], documents: 1},'
    ' {budgets: ["4+16"], lengths: [96], documents: 2}]',
]  # fmt: skip
RULER = [
    "suite.ruler.tasks=[niah_single_1,niah_multivalue]", "suite.ruler.lengths=[900]", "suite.ruler.samples=1",
    "suite.ruler.new_tokens=16", "suite.ruler.generate=4",
    'suite.ruler.passes=[{budgets: ["4+16"], methods: [bf16, rolaq]}]',
]  # fmt: skip


def run(folder, *arguments, module="rolaq.eval", fails=False):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    if fails:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 1 and len(errors) == 1 and "Traceback" not in done.stderr
        return errors[0]
    return done.stdout


@pytest.fixture(scope="module")
def first(workspace):
    """The first run: its output and its results."""
    output = run(workspace, *MINIATURE, *RULER)
    return output, json.loads((workspace / "results" / "model" / "quick.json").read_text())


def test_run_writes_flat_rows(first, workspace):
    output, results = first
    assert "artifacts/model/rolaq" in output and "| rolaq |" in output and "quick.md" in output
    quality = results["quality"]
    # 8 methods, 2 domains: 2 lengths without protection, 1 with
    assert len(quality) == 8 * 2 * 3
    named = (
        "model",
        "method",
        "seed",
        "budget",
        "reading",
        "domain",
        "length",
        "kl",
        "ppl",
        "bytes_per_token",
    )
    for row in quality:
        assert set(named) | {"commit", "gpu", "command", "date", "documents", "positions"} <= set(row)
        assert all(not isinstance(value, (dict, list)) for value in row.values())
        assert (row["kl"] == 0) == (row["method"] == "bf16")
    assert {(row["method"], row["budget"], row["task"]) for row in results["ruler"]} == {
        (method, "4+16", task)
        for method in ("bf16", "rolaq")
        for task in ("niah_single_1", "niah_multivalue")
    }
    assert results["meta"]["ruler"]["essay"].startswith("books of the local test text")
    assert results["meta"]["ruler"]["generate"] == 4
    assert results["meta"]["config"]["suite"]["ruler"]["samples"] == 1
    assert len(results["energy"]) == 2 and results["selection"][0]["S"] == 0.7
    figures = {path.name for path in (workspace / "results" / "model" / "figures" / "quick").iterdir()}
    assert {
        "energy.png",
        "gain_sweep.png",
        "kl_domain_0+0.png",
        "kl_length_0+0.png",
        "ruler_4+16.png",
    } <= figures


def test_gain_sweep_picks_the_best(first):
    rows = first[1]["gain_sweep"]
    assert [row["gain"] for row in rows] == [1.025, 1.069, 1.114, 1.16, 1.203, 1.248]
    assert next(row["relative"] for row in rows if row["gain"] == 1.16) == 1.0
    # sigma-independent: kappa of the paper's six gains (Appendix B.1)
    assert [round(row["kappa"], 2) for row in rows] == [0.92, 0.96, 1.0, 1.04, 1.08, 1.12]


def test_stopped_run_resumes(first, workspace):
    """Rows that are there stay as they are; what is missing is measured again, with the same numbers."""
    path = workspace / "results" / "model" / "quick.json"
    content = json.loads(path.read_text())
    kept = [row for row in content["quality"] if not (row["method"] == "oscar" and row["domain"] == "forum")]
    marked = [{**row, "date": "1999-01-01"} for row in kept]
    path.write_text(json.dumps({**content, "quality": marked}))
    run(workspace, *MINIATURE, "suite.ruler=null")
    rows = json.loads(path.read_text())["quality"]
    assert sorted(row["date"] == "1999-01-01" for row in rows) == [False] * 3 + [True] * (len(rows) - 3)

    def numbers(table):
        return {tuple(row[k] for k in ("method", "budget", "domain", "length")): row["kl"] for row in table}

    assert numbers(rows) == numbers(content["quality"])
    assert json.loads(path.read_text())["ruler"] == content["ruler"]


def test_report_of_a_run(first, workspace):
    (workspace / "README.md").write_text("# X\n\n<!-- results:start -->\n<!-- results:end -->\n")
    output = run(workspace, "model=auto", "model.path=model", "record=true", module="rolaq.eval.report")
    assert "report.html" in output and "docs/results/quality.json" in output and "README.md" in output
    assert "| rolaq |" in (workspace / "README.md").read_text()
    assert "<h2>Suite quick</h2>" in (workspace / "results" / "model" / "report.html").read_text()


def test_unknown_suite_is_one_line(workspace):
    line = run(workspace, *MINIATURE, "suite=quik", fails=True)
    assert "Unknown suite 'quik'. Did you mean: quick" in line


ERRORS = {
    "methods=[rolaqq]": "Unknown method 'rolaqq'. Did you mean: rolaq",
    "artifact=/nowhere": "run `make calibrate MODEL=model` first",
    "protect.budgets=[4-16]": "write sinks+recent, for example 4+16",
    "suite.gain_sweep.documents=500": "too little books text",
    "suite.gain_sweep.length=5000": "suite.gain_sweep.length=5000 is longer than the 4096 tokens",
    "suite.ruler.tasks=[niah_single_9]": "suite.ruler.tasks.0='niah_single_9'",
    "data.test=[data/val.jsonl]": "validation and test text share 6 documents",
}


@pytest.mark.parametrize("argument", ERRORS)
def test_user_errors(workspace, tmp_path, monkeypatch, argument):
    """In this process, where the configuration comes from Hydra all the same."""
    monkeypatch.chdir(workspace)
    extra = ["methods=[bf16]"] if argument.startswith("data.test") else []
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        cfg = compose("eval", [*MINIATURE, f"output={tmp_path}", argument, *extra])
    with pytest.raises(RolaqError) as error:
        evaluate(cfg)
    assert ERRORS[argument] in str(error.value) and "\n" not in str(error.value)
