"""The shipped text files and tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import rolaq.testbed
from rolaq.testbed.text.make import SOURCES, excerpt

FOLDER = Path(rolaq.testbed.__file__).parent
NAMES = ("fit", "train", "val", "test")


def documents(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / "text" / f"{name}.jsonl").read_text("utf8").rstrip("\n").split("\n")
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER / "tiny")


def test_no_document_is_in_two_files():
    sources = [d["source"] for name in NAMES for d in documents(name)]
    assert len(sources) == len(set(sources))


@pytest.mark.parametrize("name", NAMES)
def test_every_source_is_public_domain(name):
    assert {d["source"].split(":")[0] for d in documents(name)} <= set(SOURCES)


def test_fit_has_enough_tokens(tokenizer):
    assert sum(len(tokenizer(d["text"]).input_ids) for d in documents("fit")) >= 12_000


@pytest.mark.parametrize("name", ["val", "test"])
def test_each_domain_has_several_windows(tokenizer, name):
    tokens: dict[str, int] = {}
    for d in documents(name):
        tokens[d["domain"]] = tokens.get(d["domain"], 0) + len(tokenizer(d["text"]).input_ids)
    assert set(tokens) == {"books", "reference", "web"}
    assert min(tokens.values()) >= 4 * 2048


@pytest.mark.parametrize("text", ["Twelve 1207 naïve\n\n  cafés: 道可道 \u2028 x", "", " a\tb "])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("90210") == list("90210")


def test_end_of_text_serves_all_roles(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tokenizer.bos_token_id == 0


def test_excerpt_ends_at_a_paragraph():
    assert excerpt("one\n\ntwo two\n\nthree", 14) == "one\n\ntwo two"
    assert excerpt("short", 14) == "short"
