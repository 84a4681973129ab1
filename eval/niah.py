"""RULER's eight retrieval tasks: lm-eval's generator and scoring, with our sizes and our text.

lm-eval sizes the essay haystack in steps of 500 words, which leaves nothing of it at 1K tokens.
Here the haystack is sized as in RULER itself: the largest one, by binary search, for which prompt,
answer prefix and new tokens fit the wanted length. Prompts are lm-eval's, call by call.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rolaq.common.errors import RolaqError, one_line
from rolaq.common.text import read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, UNTRAINED = "nltk punkt_tab", "nltk punkt, untrained (punkt_tab is not installed)"


@contextmanager
def quiet() -> Iterator[None]:
    """Errors only from lm-eval and Transformers: no warnings that do not concern us, no bars inside ours."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers", "httpx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@cache
def sentence_splitter() -> str:
    """Which of nltk's sentence splitters is used: the official trained one, or its untrained form."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return UNTRAINED
    return TRAINED


@cache
def generator() -> ModuleType:
    """lm-eval's `prepare_niah`, which downloads punkt_tab when imported, without that download."""
    import nltk

    download = nltk.download
    nltk.download = lambda *args, **kwargs: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from lm_eval.tasks.ruler import prepare_niah
    except ImportError as error:
        raise RolaqError(
            f"RULER needs lm-eval's generator: pip install 'lm_eval[ruler]' ({one_line(error)})"
        ) from error
    finally:
        nltk.download = download
    if sentence_splitter() == UNTRAINED:
        prepare_niah.sent_tokenize = nltk.tokenize.PunktSentenceTokenizer().tokenize
    return prepare_niah


@cache
def template() -> str:
    """lm-eval's prompt template of the retrieval tasks."""
    generator()  # the guarded import comes first
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    return TEMPLATE


def words_of(essay: Sequence[str], domain: str | None = None) -> list[str]:
    """The essay haystack: words of the documents of ``essay`` (of one ``domain``, if given).

    Raises:
        RolaqError: no text there.
    """
    documents = read_documents(list(essay))
    texts = [item.text for item in documents if domain in (None, item.domain)]
    if not texts:
        raise RolaqError(
            f"no {domain} text in {', '.join(essay)}: set suite.ruler.essay_domain to one that is there"
        )
    return re.sub(r"\s+", " ", " ".join(texts)).strip().split(" ")


def make_item(size: int, haystack: Any, needles: Mapping[str, Any]) -> dict[str, Any]:
    """One prompt with ``size`` haystack units: ``input``, ``outputs`` and ``gen_prefix``.

    Draws from Python's global random state, as lm-eval and RULER do.
    """
    text, answers, query = generator().generate_input_output(size, haystack, template=template(), **needles)
    kind = needles["type_needle_v"]
    single = needles["num_needle_q"] * needles["num_needle_v"] == 1
    kind, verb = (kind[:-1], "is") if single else (kind, "are")
    prefix = f"The special magic {kind} for {query} mentioned in the provided text {verb}"
    return {"input": text, "outputs": answers, "gen_prefix": prefix}


def make_items(
    needles: Mapping[str, Any], haystack: Any, tokenizer: PreTrainedTokenizerBase, length: int, samples: int, seed: int,
    new_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """``samples`` prompts that take at most ``length`` tokens together with ``new_tokens`` generated ones.

    Raises:
        RolaqError: not even the needles alone fit.
    """
    least = needles["num_needle_k"] * needles["num_needle_v"]
    room = length - new_tokens

    def draw(size: int) -> dict[str, Any] | None:
        item = make_item(size, haystack, needles)
        tokens = len(tokenizer(f"{item['input']} {item['gen_prefix']}").input_ids)
        return {**item, "length": tokens + new_tokens, "max_length": length} if tokens <= room else None

    random.seed(seed)
    best = _largest(draw, least, room)
    if best is None:
        raise RolaqError(
            f"RULER length {length} leaves no room for {least} needles: ask for a longer suite.ruler.lengths"
        )
    # the items shall not depend on how long the search took
    random.seed(seed)
    return [{"index": index, **_fitting(draw, best, least)} for index in range(samples)]


def _largest(draw: Any, least: int, most: int) -> int | None:
    """The largest haystack that fits, by RULER's binary search; no unit is shorter than a token."""
    best = None
    while least <= most:
        middle = (least + most) // 2
        if draw(middle) is None:
            most = middle - 1
        else:
            best, least = middle, middle + 1
    return best


def _fitting(draw: Any, size: int, least: int) -> dict[str, Any]:
    """An item of ``size`` units, or of a few less when its random keys take more tokens."""
    step = max(1, size // 50)
    while (item := draw(max(size, least))) is None:
        if size <= least:
            raise RolaqError("RULER: an item does not fit its length; ask for a longer suite.ruler.lengths")
        size -= step
    return item


def dataset(
    *, tokenizer: str, essay: Sequence[str], lengths: Sequence[int], samples: int, needles: Mapping[str, Any],
    essay_domain: str | None = None, seed: int = 42, new_tokens: int = 128, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """The ``custom_dataset`` of the tasks in `eval/tasks`; arguments come from lm-eval's metadata."""
    import datasets
    from lm_eval.tasks.ruler.common_utils import get_tokenizer

    kind, most = needles["type_haystack"], max(lengths)
    haystack: Any = haystack_of(kind) if kind != "essay" else words_of(essay, essay_domain)
    if kind == "essay":
        haystack = haystack * (1 + most // len(haystack))
    arguments = (haystack, get_tokenizer(tokenizer))
    rows = [row for n in lengths for row in make_items(needles, *arguments, n, samples, seed, new_tokens)]
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}


def haystack_of(kind: str) -> str:
    """The sentence that the ``repeat`` and ``needle`` haystacks are made of."""
    return generator().get_haystack(type_haystack=kind)


def process_results(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's `string_match_all` of one item: the share of its values found in the prediction."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": string_match_all(postprocess_pred(results), [list(doc["outputs"])])}
