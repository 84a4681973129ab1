"""Answers packed in bits, and McNemar's exact test against SciPy's binomial test."""

import random

import pytest
from scipy.stats import binomtest

from rolaq.eval.paired import disagreements, mcnemar, packed, unpacked


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_packing_is_lossless(n):
    answers = [random.Random(n + i).random() < 0.3 for i in range(n)]
    assert unpacked(packed(answers), n) == answers


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (1, 0), (0, 5), (3, 3), (10, 2), (277, 69), (2000, 1900)]
)
def test_mcnemar_is_the_sign_test(first, second):
    n = first + second
    expected = binomtest(first, n, 0.5).pvalue if n else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9)


def test_disagreements():
    assert disagreements([True, True, False, False], [True, False, True, True]) == (1, 2)
    with pytest.raises(ValueError, match="shorter|longer"):
        disagreements([True], [])
