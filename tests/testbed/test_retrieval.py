"""Prompts agree with lm-eval's generator, draw by draw."""

import importlib
import random
import sys
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import rolaq.testbed
from rolaq.testbed.data import END_OF_TEXT_ID
from rolaq.testbed.retrieval import TASKS, Words, draw, make_prompt
from rolaq.testbed.synthetic import PromptMaker, Source, example, make_row

TOKENIZER = Path(rolaq.testbed.__file__).parent / "tiny" / "tokenizer.json"
# Enough pairs that no key is drawn twice.
WORDS = Words(
    tuple(first + last for first in ("bra", "cal", "eag") for last in ("ve", "ma", "er", "ish")),
    tuple(first + last for first in ("can", "lan", "mead", "ap") for last in ("yon", "tern", "ow")),
)
SENTENCES = [f"This is sentence number {n} of a text." for n in range(60)]


@pytest.fixture(scope="module")
def prepare_niah():
    """lm-eval's module, with stand-ins for the packages and data it asks for on import."""
    pytest.importorskip("lm_eval")
    nltk = types.ModuleType("nltk")
    nltk.sent_tokenize = lambda text: [text]
    nltk.data = types.SimpleNamespace(find=lambda name: name)
    wonderwords = types.ModuleType("wonderwords")
    categories = {"nouns": WORDS.nouns, "adjectives": WORDS.adjectives, "verbs": ()}
    wonderwords.RandomWord = lambda: types.SimpleNamespace(_categories=categories)
    name = "lm_eval.tasks.ruler.prepare_niah"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nltk", nltk)
        patch.setitem(sys.modules, "wonderwords", wonderwords)
        patch.setattr("importlib.metadata.version", lambda package: "9.9")
        module = importlib.import_module(name)
        patch.setattr(module, "cached_sent_tokenize", lambda text: SENTENCES)
        patch.setattr(module, "generate_random_word", lambda: draw("words", random, WORDS))
        yield module
    sys.modules.pop(name, None)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("seed", [0, 42])
def test_same_prompt_as_lm_eval(prepare_niah, name, seed):
    niah_utils = importlib.import_module("lm_eval.tasks.ruler.niah_utils")
    task = TASKS[name]
    kind = {"noise": "repeat"}.get(task.haystack, task.haystack)
    random.seed(seed)
    haystack = SENTENCES if kind == "essay" else prepare_niah.get_haystack(kind)
    text, answers, query = prepare_niah.generate_input_output(
        9,
        haystack,
        type_haystack=kind,
        num_needle_k=task.keys,
        type_needle_k=task.key_type,
        num_needle_v=task.values,
        type_needle_v=task.value_type,
        template=niah_utils.TEMPLATE,
        num_needle_q=task.queries,
    )
    mine = make_prompt(
        task,
        random.Random(seed),
        WORDS,
        SENTENCES if kind == "essay" else 9,
        needle_order=random.Random(42),
    )
    assert mine.text == text
    assert sorted(mine.first.values) == sorted(answers)
    assert query in mine.first.prefix


def test_answer_prefixes():
    rng = random.Random(1)
    single = make_prompt(TASKS["niah_single_3"], rng, WORDS, SENTENCES).first
    several = make_prompt(TASKS["niah_multiquery"], rng, WORDS, SENTENCES).first
    assert single.prefix.startswith("The special magic uuid for ")
    assert single.prefix.endswith(" mentioned in the provided text is")
    assert several.prefix.startswith("The special magic numbers for ")
    assert several.prefix.endswith(" mentioned in the provided text are")
    assert several.answer == " " + ", ".join(several.values)


@pytest.fixture(scope="module")
def maker():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return PromptMaker(tokenizer, Source(WORDS, SENTENCES), random.Random(3))


@pytest.mark.parametrize("name", TASKS)
def test_prompts_have_the_wanted_length(maker, name):
    ids, is_answer = example(maker, maker.prompt(TASKS[name], 800), questions=0)
    assert 640 <= len(ids) <= 960
    assert is_answer[-1] and ids[-1] == END_OF_TEXT_ID


@pytest.mark.parametrize("name", TASKS)
def test_tokens_of_the_parts_are_those_of_the_whole(maker, name):
    prompt = maker.prompt(TASKS[name], 300)
    ids, is_answer = example(maker, prompt, questions=0)
    assert ids[:-1] == maker.encode(prompt.model_input + prompt.first.answer)
    asked = [token for token, answer in zip(ids, is_answer, strict=True) if answer]
    assert maker.tokenizer.decode(asked) == prompt.first.answer


def test_a_row_repeats_with_its_seed():
    rows = []
    for _ in range(2):
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        maker = PromptMaker(tokenizer, Source(WORDS, SENTENCES), random.Random(7))
        rows.append(make_row(maker, 1025))
    assert (rows[0][0] == rows[1][0]).all() and (rows[0][1] == rows[1][1]).all()
    assert 0 < rows[0][1].mean() < 0.5
