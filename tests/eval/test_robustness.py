"""Inputs no calibration saw: what they are, and the rows measured on them."""

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.eval.methods import METHODS
from rolaq.eval.robustness import REFERENCE, inputs, methods, rows_of


def test_inputs(target, workspace):
    text = [str(workspace / "data" / "test.jsonl")]
    found = inputs(target, 40, 3, text, long=90)
    assert {name: tuple(ids.shape) for name, ids in found.items()} == {
        "random tokens": (3, 40), "one token": (3, 40), "cycle of 16": (3, 40), "code": (3, 40), "90 tokens": (1, 90),
    }  # fmt: skip
    assert (found["one token"] == found["one token"][:, :1]).all()
    assert torch.equal(found["cycle of 16"][:, :24], found["cycle of 16"][:, 16:])
    assert len(found["random tokens"].unique()) > 50
    assert target.tokenizer.eos_token_id not in found["random tokens"]
    assert "books test says" in target.tokenizer.decode(found["90 tokens"][0])


def test_rows(target, workspace):
    folder = workspace / "artifacts" / "model"
    compared = methods(target, [str(folder / "rolaq"), str(folder / "rolaq-feedback")])
    rows = rows_of(target, compared, {"random tokens": inputs(target, 40, 2, [])["random tokens"]})
    assert {row["method"] for row in rows} <= set(METHODS) and len(rows) == 5
    kl = {row["method"]: row["kl"] for row in rows}
    assert all(row["relative"] == pytest.approx(row["kl"] / kl[REFERENCE]) for row in rows)
    assert [row["seed"] for row in rows] == [None, None, None, 42, 43]


def test_too_little_text(target, workspace):
    with pytest.raises(RolaqError, match="too little text: 100000 tokens needed"):
        inputs(target, 16, 1, [str(workspace / "data" / "test.jsonl")], long=100000)
