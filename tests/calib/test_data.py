"""Batches, validation documents, and what is said when text is missing or shared."""

import pytest
import torch

from rolaq.calib.data import cut, prepare, take, training_batches, validation_documents, without
from rolaq.common.config import DataConfig
from rolaq.common.errors import RolaqError
from rolaq.common.text import Document, read_documents


def source(text, **changes):
    lists = {name: [path] for name, path in text.items()}
    return DataConfig(name="test", **(lists | changes))


def test_batches_have_the_planned_shapes_and_no_token_is_seen_twice(text, tokenizer, make_config):
    config = make_config(steps=6)
    batches, used = training_batches(read_documents(text["train"]), tokenizer, config, seed=1)
    assert [tuple(b.shape) for b in batches] == [(4, 32), (2, 64), (1, 128)] * 2
    assert 0 < len(used) <= 24
    rows = [tuple(row.tolist()) for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)


def test_the_seed_orders_the_training_text_and_nothing_else(text, tokenizer, make_config):
    first, again, other = (prepare(source(text), tokenizer, make_config(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.batches, again.batches, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.batches, other.batches, strict=True))
    assert torch.equal(first.fit, other.fit)
    assert first.about["val"] == other.about["val"]
    assert all(torch.equal(first.validation[n], other.validation[n]) for n in (32, 64, 128))
    assert first.about["train"]["tokens"] == 4 * 128
    assert first.fit.numel() == 512


def test_fitting_documents_are_taken_out_of_the_training_text(text, tokenizer, make_config):
    data = prepare(source(text, fit=[]), tokenizer, make_config(), 1)
    assert data.about["fit"]["documents"] > 0


def test_one_long_document_serves_for_fitting_and_for_training(tokenizer, make_config, tmp_path):
    words = "".join(f"word{n} " for n in range(20_000))
    for name, text in (("train", words), ("val", words[::-1])):
        (tmp_path / f"{name}.txt").write_text(text)
    lists = {name: [str(tmp_path / f"{name}.txt")] for name in ("train", "val")}
    data = prepare(DataConfig(name="book", **lists), tokenizer, make_config(), 1)
    assert data.about["train"]["documents"] == data.about["fit"]["documents"] == 1


def test_what_is_left_without_the_pieces():
    document = Document("aaaabbbbcccc", "s", "d")
    pieces = [(0, Document("bbbb", "s", "d")), (1, Document("x", "s", "d"))]
    rest = without([document, Document("x", "s", "d"), Document("y", "s", "d")], pieces, 4)
    assert [item.text for item in rest] == ["aaaacccc", "y"]


def test_validation_documents_take_turns_over_domains(tokenizer):
    documents = [Document(f"{d} " * 400, f"{d}{i}", d) for d in ("left", "right", "up") for i in range(2)]
    ids = validation_documents(documents, tokenizer, 64, 4)
    starts = [tokenizer.decode(row).split()[0] for row in ids]
    assert starts == ["left", "right", "up", "left"]


def test_long_documents_are_cut_and_all_their_text_kept():
    documents = [Document("abc" * 1000, "long", "x"), Document("z", "short", "x")]
    pieces = list(cut(documents, 1024, seed=0))
    assert sorted(len(piece.text) for _, piece in pieces) == [1, 952, 1024, 1024]
    assert [index for index, _ in cut(documents, 1024, 0)] == [index for index, _ in pieces]


def test_take_says_how_much_is_missing(tokenizer):
    pieces = cut([Document("one two three", "d", "x")], 100, 0)
    with pytest.raises(
        RolaqError, match=r"too little training text: more than 900 tokens needed, \d+ available"
    ):
        list(take(pieces, tokenizer, 900, "training"))


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"steps": 4000}, "too little training text"),
        ({"fit": "train"}, {"steps": 30, "fit_tokens": 2048}, "fit and train text share"),
        ({"val": "train"}, {}, "train and val text share"),
        ({"val": "fit"}, {}, "fit and val text share"),
        ({}, {"validation": {"documents": 1000}}, "too little"),
    ],
)
def test_missing_and_shared_text(text, tokenizer, make_config, changes, settings, message):
    lists = {name: [text[other]] for name, other in changes.items()}
    with pytest.raises(RolaqError, match=message) as error:
        prepare(source(text, **lists), tokenizer, make_config(**settings), 1)
    assert "\n" not in str(error.value)
