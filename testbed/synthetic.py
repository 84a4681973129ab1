"""Rows of retrieval prompts, packed to a fixed length, made in parallel."""

import math
import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from rolaq.testbed.data import END_OF_TEXT_ID, start_worker, worker_tokenizer
from rolaq.testbed.retrieval import NOISE, TASKS, Prompt, Task, Words, draw, make_prompt

SHORTEST = 160
LONGEST_SENTENCE = 600
ROWS_PER_JOB = 64

# Tasks with several keys, and with uuids, are learned last and get more of the prompts.
MIXTURE = {
    "niah_single_1": 0.06,
    "niah_single_2": 0.08,
    "niah_single_3": 0.12,
    "niah_multikey_1": 0.14,
    "niah_multikey_2": 0.18,
    "niah_multikey_3": 0.18,
    "niah_multivalue": 0.12,
    "niah_multiquery": 0.12,
}


@dataclass(frozen=True)
class Source:
    """What prompts are made of: key words and the sentences of the essay haystacks."""

    words: Words
    sentences: list[str]


# Inherited by forked workers.
_source: Source | None = None


class PromptMaker:
    """Makes prompts of a wanted length in tokens."""

    def __init__(self, tokenizer: Tokenizer, source: Source, rng: random.Random) -> None:
        self.tokenizer, self.source, self.rng = tokenizer, source, rng
        sample = " ".join(rng.choices(source.sentences, k=500))
        self.tokens_per_character = len(self.encode(sample)) / len(sample)
        self.template = len(self.encode(self._of_size(TASKS["niah_single_2"], 0).model_input))

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, task: Task, tokens: int) -> Prompt:
        """A prompt whose text, prefix and answer take about `tokens` tokens."""
        needles = task.keys * task.values
        fixed = self.template + (needles - 1) * self._needle_tokens(task)
        budget = tokens - fixed - self._value_tokens(task) * task.queries * task.values
        if task.haystack == "essay":
            return self._of_size(task, max(budget, 1))
        unit = len(self.encode(NOISE + "\n"))
        if task.haystack == "needle":
            unit = self._needle_tokens(task)
        return self._of_size(task, max(budget // unit, needles))

    def question_tokens(self, task: Task) -> int:
        """Tokens of one further question about a context, with its prefix and answer."""
        key = len(self.encode(draw(task.key_type, self.rng, self.source.words)))
        return 32 + 2 * key + self._value_tokens(task)

    def _of_size(self, task: Task, size: int) -> Prompt:
        haystack = self._essay(size) if task.haystack == "essay" else size
        return make_prompt(task, self.rng, self.source.words, haystack)

    def _essay(self, tokens: int) -> list[str]:
        sentences = self.source.sentences
        left = tokens / self.tokens_per_character
        index = self.rng.randrange(len(sentences))
        essay: list[str] = []
        while (left := left - len(sentences[index]) - 1) >= 0:
            essay.append(sentences[index])
            index = (index + 1) % len(sentences)
        return essay

    def _needle_tokens(self, task: Task) -> int:
        key = len(self.encode(draw(task.key_type, self.rng, self.source.words)))
        return 12 + key + self._value_tokens(task)

    def _value_tokens(self, task: Task) -> int:
        return len(self.encode(draw(task.value_type, self.rng, self.source.words))) + 2


def example(maker: PromptMaker, prompt: Prompt, questions: int) -> tuple[list[int], list[bool]]:
    """Token ids of a prompt with its answer, and which of them are answers.

    Up to `questions` further questions about the same context follow, each after
    the end-of-text that closes the answer before it.
    """
    ids, is_answer = [], []
    asked = [(prompt.model_input, prompt.first)]
    chosen = maker.rng.sample(prompt.others, min(questions, len(prompt.others)))
    asked += [(f"{other.question} {other.prefix}", other) for other in chosen]
    for text, question in asked:
        given = maker.encode(text)
        answer = [*maker.encode(question.answer), END_OF_TEXT_ID]
        ids += given + answer
        is_answer += [False] * len(given) + [True] * len(answer)
    return ids, is_answer


def make_row(maker: PromptMaker, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of random tasks and lengths: ids (uint16) and answer mask (bool), both [length]."""
    ids = np.full(length, END_OF_TEXT_ID, dtype=np.uint16)
    mask = np.zeros(length, dtype=bool)
    rng, used, failures = maker.rng, 0, 0
    while length - used >= SHORTEST and failures < 3:
        task = TASKS[rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]]
        target = min(_random_length(rng, length), length - used)
        questions = rng.choice((0, 0, 1, 2, 4, 6))
        if task.haystack == "needle" or task.keys > task.queries:
            target -= questions * maker.question_tokens(task)
        prompt = maker.prompt(task, int(target * 0.97))
        new_ids, new_mask = example(maker, prompt, questions)
        if used + len(new_ids) > length:
            failures += 1
            continue
        ids[used : used + len(new_ids)] = new_ids
        mask[used : used + len(new_ids)] = new_mask
        used += len(new_ids)
    return ids, mask


def _random_length(rng: random.Random, longest: int) -> int:
    if rng.random() < 0.5:
        return int(math.exp(rng.uniform(math.log(SHORTEST), math.log(longest))))
    return rng.randint(600, max(longest, 600))


def make_rows(
    source: Source, tokenizer_file: Path, rows: int, length: int, seed: int, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """`rows` packed rows: ids (uint16) and answer mask (bool), both [rows, length]."""
    global _source
    _source = source
    jobs = [(seed, job, length) for job in range(-(-rows // ROWS_PER_JOB))]
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, start_worker, (str(tokenizer_file),)) as pool:
        ids, masks = zip(*pool.map(_make_job, jobs, chunksize=1), strict=True)
    return np.concatenate(ids)[:rows], np.concatenate(masks)[:rows]


def _make_job(job: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    seed, index, length = job
    assert _source is not None
    maker = PromptMaker(worker_tokenizer(), _source, random.Random(f"{seed}/{index}"))
    ids, masks = zip(*(make_row(maker, length) for _ in range(ROWS_PER_JOB)), strict=True)
    return np.stack(ids), np.stack(masks)
