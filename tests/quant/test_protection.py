"""Budgets and readings."""

import pytest

from rolaq.common.errors import RolaqError
from rolaq.quant.protection import UNPROTECTED, Protection


@pytest.mark.parametrize(
    ("text", "sink", "recent"), [("0+0", 0, 0), ("4+16", 4, 16), (" 4 + 8 ", 4, 8), ("100+0", 100, 0)]
)
def test_budgets(text, sink, recent):
    protection = Protection.parse(text, "storage")
    assert protection == Protection(sink, recent, "storage")
    assert Protection.parse(protection.budget) == Protection(sink, recent)


@pytest.mark.parametrize("text", ["", "4", "+", "4+", "a+b", "4+-1", "4+8+1", "4.5+1", None])
def test_bad_budgets(text):
    with pytest.raises(RolaqError, match="4\\+16"):
        Protection.parse(text)


@pytest.mark.parametrize(
    "values", [{"sink": -1}, {"recent": -3}, {"sink": 1.5}, {"recent": True}, {"reading": "perquery"}]
)
def test_bad_values(values):
    with pytest.raises(RolaqError, match=str(next(iter(values.values())))):
        Protection(**values)


def test_window():
    assert Protection(0, 0, "per_query") == UNPROTECTED
    assert [Protection(4, 16).window_start(n) for n in (0, 3, 16, 17, 40)] == [0, 0, 0, 1, 24]
