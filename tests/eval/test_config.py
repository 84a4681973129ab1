"""Suites and protections fit the settings' model; wrong values are named."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from rolaq.common.config import resolve
from rolaq.common.errors import RolaqError
from rolaq.eval.config import EvalConfig
from rolaq.eval.report import ReportConfig

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = [
    f"{group}={path.stem}" for group in ("suite", "protect") for path in sorted((CONF / group).glob("*.yaml"))
]


def settings(*overrides, command="eval", model=EvalConfig):
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        return resolve(compose(command, list(overrides)), model)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_resolves(option):
    group, name = option.split("=")
    found = settings(option)
    assert group != "suite" or found.suite.name == name


def test_full_suite_is_the_paper_sized_one():
    suite = settings("suite=full").suite
    assert suite.ruler.samples == 100 and suite.ruler.generate is None and suite.ruler.new_tokens == 128
    assert suite.divergence.skip == 16
    assert all(
        item.budgets is None and item.methods is None
        for item in [*suite.divergence.passes, *suite.ruler.passes]
    )


def test_report_composes():
    assert settings(command="report", model=ReportConfig).model.name == "tiny"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("protect.budgets=[]", "protect.budgets=[]"),
        ("protect.reading=query", "protect.reading='query'"),
        ("suite.ruler.samples=0", "suite.ruler.samples=0"),
        (
            "suite.divergence.passes=[{lengths: [512], documents: 1, methods: [quarott]}]",
            "Did you mean: quarot",
        ),
        ("+suite.ruler.sample=3", "suite.ruler.sample is not a known setting"),
        ("suite.ruler.generate=200", "at most new_tokens"),
        ("protect.budgets=[4-16]", "protect.budgets.0='4-16': protection budget '4-16': write sinks+recent"),
        ("suite.ruler.passes=[{budgets: [4]}]", "suite.ruler.passes.0.budgets.0="),
        ("methods=[]", "methods=[]"),
        ("threads=0", "threads=0"),
        ("suite.gain_sweep.gains=[0.0]", "suite.gain_sweep.gains.0=0.0"),
        ("suite.gain_sweep.gains=[.inf]", "suite.gain_sweep.gains.0="),
        ("suite.gain_sweep.gains=[nan]", "suite.gain_sweep.gains.0="),
        ("suite.gain_sweep.length=1", "suite.gain_sweep.length=1"),
        ("suite.gain_sweep.last=0", "suite.gain_sweep.last=0"),
        ("suite.gain_sweep.last=1024", "suite.gain_sweep.last=1024: must be less than length, 1024"),
        ("suite.divergence.passes=[{lengths: [512, 17], documents: 1}]", "must be more than skip + 1 = 17"),
    ],
)
def test_wrong_values_are_named(override, message):
    with pytest.raises(RolaqError) as error:
        settings(override)
    assert message in str(error.value)


def test_budgets_have_one_spelling():
    passes = "suite.ruler.passes=[{budgets: ['4 + 08', '04+16']}]"
    found = settings(passes, "protect.budgets=['04+16', '4 + 8', '4+16']")
    assert found.protect.budgets == ["4+16", "4+8"]
    assert found.suite.ruler.passes[0].budgets == ["4+8", "4+16"]


def test_a_budget_that_no_pass_measures_is_an_error():
    only = ["suite.divergence=null", "protect.budgets=['4+16', '8+8']"]
    with pytest.raises(RolaqError, match=r"protect.budgets=\['8\+8'\]: no pass"):
        settings(*only)
    assert settings(*only, "suite.ruler=null").suite.passes == []
