"""RULER's eight retrieval tasks as prompts made from a seeded generator.

Templates, needle types and the order of random draws follow lm-eval's
`tasks/ruler/prepare_niah.py`, so that one seed gives the same prompt in both.
"""

import itertools
import random
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {values} afterwards.\n{context}\n{question}"
)
QUESTION = "What are all the special magic {values} for {query} mentioned in the provided text?"
PREFIX = "The special magic {values} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {values} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * step / 39) for step in range(40)]


@dataclass(frozen=True)
class Task:
    """One row of RULER's table; `haystack` is "noise", "essay" or "needle"."""

    haystack: str
    key_type: str = "words"
    value_type: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


TASKS = {
    "niah_single_1": Task("noise"),
    "niah_single_2": Task("essay"),
    "niah_single_3": Task("essay", value_type="uuids"),
    "niah_multikey_1": Task("essay", keys=4),
    "niah_multikey_2": Task("needle"),
    "niah_multikey_3": Task("needle", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Task("essay", values=4),
    "niah_multiquery": Task("essay", keys=4, queries=4),
}


@dataclass(frozen=True)
class Question:
    """A question about a context, the answer's fixed beginning, and the values asked for."""

    question: str
    prefix: str
    values: tuple[str, ...]

    @property
    def answer(self) -> str:
        """What follows the prefix, a leading space included."""
        return " " + ", ".join(self.values)


@dataclass(frozen=True)
class Prompt:
    """A RULER prompt (`text` ends with the first question) and further questions about it."""

    text: str
    first: Question
    others: tuple[Question, ...]

    @property
    def model_input(self) -> str:
        """The text a model continues, as lm-eval joins prompt and answer prefix."""
        return f"{self.text} {self.first.prefix}"


@dataclass(frozen=True)
class Words:
    """The adjectives and nouns that word keys are made of."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]


def load_words(folder: Path | None = None) -> Words:
    """Word lists of the package wonderwords, or of a folder with its two text files.

    Raises `ImportError` without the package and `FileNotFoundError` without the files.
    """
    if folder is None:
        import wonderwords

        # lm-eval reads the lists from the same attribute.
        categories = wonderwords.RandomWord()._categories
        lists = [categories["adjectives"], categories["nouns"]]
    else:
        names = ("adjectivelist.txt", "nounlist.txt")
        lists = [(folder / name).read_text("utf8").split("\n") for name in names]
    return Words(*(tuple(sorted({word for word in words if word})) for words in lists))


def split_sentences(text: str) -> list[str]:
    """Sentences of a text whose white space is collapsed to single spaces."""
    return re.split(r"(?<=[.!?]) ", re.sub(r"\s+", " ", text).strip())


def draw(kind: str, rng: random.Random, words: Words) -> str:
    """A random "words" pair, 7-digit "numbers" or version-4 "uuids" string."""
    if kind == "words":
        return f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise ValueError(f"Unknown kind {kind!r}. Available: words, numbers, uuids")


def make_prompt(
    task: Task,
    rng: random.Random,
    words: Words,
    haystack: list[str] | int,
    needle_order: random.Random | None = None,
) -> Prompt:
    """One prompt of `task`.

    `haystack`: the sentences of an essay, or the number of noise or needle lines
    (at least the number of needles). `needle_order` shuffles the needles; lm-eval
    uses a fresh `Random(42)` for every prompt, the default is `rng` itself.
    """
    keys, pairs = [], []
    for _ in range(task.keys):
        keys.append(draw(task.key_type, rng, words))
        pairs += [(keys[-1], draw(task.value_type, rng, words)) for _ in range(task.values)]
    (needle_order or rng).shuffle(pairs)
    needles = [_needle(task, *pair) for pair in pairs]
    if isinstance(haystack, list):
        context = _hide_in_essay(haystack, needles, rng)
        distractors = []
    else:
        distractors = _distractors(task, rng, words, haystack)
        context = _hide_in_lines(task, haystack, distractors, needles, rng)
    queries = [keys[index] for index in rng.sample(range(task.keys), task.queries)]
    first = _ask(task, queries, pairs)
    rest = [pair for pair in pairs if pair[0] not in queries] + distractors
    others = tuple(_ask(task, [key], [(key, value)]) for key, value in rest)
    template = _singular(TEMPLATE) if task.queries * task.values == 1 else TEMPLATE
    text = template.format(values=_noun(task), context=context, question=first.question)
    return Prompt(text, first, others)


def _needle(task: Task, key: str, value: str) -> str:
    return NEEDLE.format(values=task.value_type, key=key, value=value)


def _noun(task: Task) -> str:
    return task.value_type[:-1] if task.queries * task.values == 1 else task.value_type


def _singular(template: str) -> str:
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _ask(task: Task, queries: list[str], pairs: list[tuple[str, str]]) -> Question:
    joined = queries[0]
    if len(queries) > 1:
        joined = ", ".join(queries[:-1]) + ", and " + queries[-1]
    templates = [QUESTION, PREFIX]
    if task.queries * task.values == 1:
        templates = [_singular(template) for template in templates]
    question, prefix = (text.format(values=_noun(task), query=joined) for text in templates)
    values = tuple(value for query in queries for key, value in pairs if key == query)
    return Question(question, prefix, values)


def _hide_in_essay(sentences: list[str], needles: list[str], rng: random.Random) -> str:
    depths = rng.sample(DEPTHS, len(needles))
    cuts = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    parts = []
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts.append(" ".join(sentences[start:stop]))
        parts += needles[index : index + 1]
    return " ".join(parts)


def _distractors(task: Task, rng: random.Random, words: Words, lines: int) -> list[tuple[str, str]]:
    if task.haystack != "needle":
        return []
    return [(draw(task.key_type, rng, words), draw(task.value_type, rng, words)) for _ in range(lines)]


def _hide_in_lines(
    task: Task,
    lines: int,
    distractors: list[tuple[str, str]],
    needles: list[str],
    rng: random.Random,
) -> str:
    texts = [_needle(task, *pair) for pair in distractors] or [NOISE] * lines
    places = sorted(rng.sample(range(lines), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        texts.insert(place, needle)
    return "\n".join(texts)
