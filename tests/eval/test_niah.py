"""RULER's retrieval tasks: prompts, sizes and scores against lm-eval and the official definition."""

import random

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolaq.common.errors import RolaqError
from rolaq.eval import niah
from rolaq.eval.paired import unpacked
from rolaq.eval.ruler import TASKS
from rolaq.eval.ruler_config import RULER_TASKS

ESSAY = [f"Sentence number {i} is about the weather and the sea." for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word or punctuation mark."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?", eos_token="?")


@pytest.fixture
def essay():
    return " ".join(ESSAY).split(" ")


def needles_of(name):
    text = (TASKS / f"{name}.yaml").read_text()
    return yaml.safe_load(text)["dataset_kwargs"]["needles"]


@pytest.fixture
def lm_eval_items(monkeypatch, tokenizer, essay):
    """lm-eval's own items of a task, with the haystack size and random state of each draw."""
    prepare = niah.generator()
    from lm_eval.tasks.ruler import niah_utils

    def make(name, length):
        draws, original = [], prepare.generate_input_output

        def spy(num_haystack, haystack, **kwargs):
            draws.append((num_haystack, random.getstate()))
            return original(num_haystack, haystack, **kwargs)

        monkeypatch.setattr(prepare, "generate_input_output", spy)
        monkeypatch.setattr(niah_utils, "get_tokenizer", lambda *_, **__: tokenizer)
        monkeypatch.setattr(niah_utils, "resolve_tokenizer_name", lambda *_: "any")
        haystack = niah_utils.get_haystack
        monkeypatch.setattr(
            niah_utils,
            "get_haystack",
            lambda type_haystack: essay if type_haystack == "essay" else haystack(type_haystack),
        )
        generate = niah_utils.generate_samples
        monkeypatch.setattr(
            niah_utils, "generate_samples", lambda *a, **k: generate(*a, **{**k, "num_samples": 3})
        )
        random.seed(42)
        items = list(getattr(niah_utils, name)(max_seq_lengths=[length])["test"])
        monkeypatch.undo()
        return items, draws

    return make


@pytest.mark.parametrize("name", RULER_TASKS)
def test_prompts_equal_those_of_lm_eval(name, lm_eval_items, essay):
    items, draws = lm_eval_items(name, 2048)
    needles = needles_of(name)
    haystack = essay if needles["type_haystack"] == "essay" else niah.haystack_of(needles["type_haystack"])
    for item, (size, state) in zip(items, draws[-len(items) :], strict=True):
        random.setstate(state)
        ours = niah.make_item(size, haystack, needles)
        assert ours == {key: item[key] for key in ("input", "outputs", "gen_prefix")}


OFFICIAL = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


@pytest.mark.parametrize("name", RULER_TASKS)
def test_settings_are_the_official_ones(name):
    needles = needles_of(name)
    found = [needles[f"num_needle_{x}"] for x in "kvq"]
    kinds = ("type_haystack", "type_needle_k", "type_needle_v")
    haystack, *types = (needles[kind] for kind in kinds)
    assert ({"repeat": "noise"}.get(haystack, haystack), *types, *found) == OFFICIAL[name]


def test_templates_are_the_official_ones(essay):
    random.seed(1)
    many = niah.make_item(200, essay, needles_of("niah_multiquery"))
    first, *_, last = many["input"].split("\n")
    assert first == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it."
        " I will quiz you about the numbers afterwards."
    )
    keys = last.removeprefix("What are all the special magic numbers for ").removesuffix(
        " mentioned in the provided text?"
    )
    assert len(keys.split(", ")) == 4 and ", and " in keys
    assert many["gen_prefix"] == f"The special magic numbers for {keys} mentioned in the provided text are"
    one = niah.make_item(200, essay, needles_of("niah_single_3"))
    first, *_, last = one["input"].split("\n")
    assert first.startswith("A special magic uuid is hidden within the following text.")
    assert first.endswith(" I will quiz you about the uuid afterwards.")
    assert last.startswith("What is the special magic uuid for ") and last.endswith(
        " mentioned in the provided text?"
    )
    key = one["gen_prefix"].split(" for ")[1].split(" mentioned")[0]
    assert f"One of the special magic uuids for {key} is: {one['outputs'][0]}." in one["input"]


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("length", [400, 1024])
def test_items_fill_their_length(name, length, tokenizer, essay):
    needles = needles_of(name)
    haystack = essay if needles["type_haystack"] == "essay" else niah.haystack_of(needles["type_haystack"])
    items = niah.make_items(needles, haystack, tokenizer, length, 3, 42, 128)
    assert items == niah.make_items(needles, haystack, tokenizer, length, 3, 42, 128)
    for item in items:
        tokens = len(tokenizer(item["input"] + " " + item["gen_prefix"]).input_ids)
        assert item["length"] == tokens + 128 <= length
        assert all(value in item["input"] for value in item["outputs"])
    # noise, the coarsest haystack unit here, is about 25 tokens; random keys vary by a few units more
    assert max(item["length"] for item in items) > length - 80


def test_no_room_is_an_error(tokenizer, essay):
    with pytest.raises(RolaqError, match="RULER length 150 leaves no room for 4 needles"):
        niah.make_items(needles_of("niah_multivalue"), essay, tokenizer, 150, 1, 42, 128)


def official_score(predictions, references):
    """`string_match_all` of NVIDIA/RULER, scripts/eval/synthetic/constants.py."""
    found = [
        sum(1.0 if r.lower() in pred.lower() else 0.0 for r in ref) / len(ref)
        for pred, ref in zip(predictions, references, strict=True)
    ]
    return round(sum(found) / len(predictions) * 100, 2)


CASES = [
    (" 1234567.", ["1234567"], 1.0),
    (" 1234568.", ["1234567"], 0.0),
    (" 1, 2 and\x0b33", ["1", "2", "33", "44"], 0.75),
    ("ABCDEF", ["abcdef"], 1.0),
    ("", ["1"], 0.0),
]


@pytest.mark.parametrize(("prediction", "values", "score"), CASES)
def test_score(prediction, values, score):
    assert niah.process_results({"outputs": values}, [prediction])["score"] == score


def test_task_score_is_the_official_one():
    from rolaq.eval.ruler import _rows

    predictions, references = [case[0] for case in CASES], [case[1] for case in CASES]
    scores = [
        niah.process_results({"outputs": r}, [p])["score"]
        for p, r in zip(predictions, references, strict=True)
    ]
    samples = [
        {"doc": {"max_length": 1024}, "doc_id": i, "prompt_hash": str(i), "score": score}
        for i, score in enumerate(scores)
    ]
    (row,) = _rows("x", samples[::-1])
    assert (row["length"], row["task"], row["n"]) == (1024, "x", 5)
    assert row["score"] == official_score(predictions, references)
    # for paired tests an item is right when all its values were found
    assert unpacked(row["correct"], 5) == [score == 1 for score in scores]
