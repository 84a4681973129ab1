"""Encoding a benchmark's texts once, in parallel, as lm-eval would encode them one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from rolaq.eval.lm import QuantizedLM
    from rolaq.eval.server_lm import ServerLM

Pair = tuple[str, str]
CHUNK = 2048


def encode_pairs(
    lm: QuantizedLM | ServerLM, known: dict[Pair, tuple[list[int], list[int]]], pairs: Sequence[Pair]
) -> None:
    """Add the token ids of every (context, continuation) to ``known``.

    The choices of a question share one context, which is encoded once; the texts of a chunk go through the
    tokenizer together, which uses all cores. Pairs that need the harness's special cases are left to it.
    """
    new = [pair for pair in dict.fromkeys(pairs) if pair not in known and _plain(lm, pair[0])]
    for start in range(0, len(new), CHUNK):
        chunk = new[start : start + CHUNK]
        texts = list(dict.fromkeys(text for pair in chunk for text in (pair[0], "".join(pair))))
        ids = dict(zip(texts, encode(lm, texts), strict=True))
        for context, continuation in chunk:
            own = ids[context]
            known[context, continuation] = own, ids[context + continuation][len(own) :]


def _plain(lm: QuantizedLM | ServerLM, context: str) -> bool:
    """Whether a context has no trailing space to move, and does not begin with the first token itself."""
    first = lm.tokenizer.decode(lm.prefix_token_id)
    return bool(context) and context == context.rstrip() and not context.startswith(first)


def encode(lm: QuantizedLM | ServerLM, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, as `HFLM.tok_encode` gives them."""
    options: dict[str, Any] = {} if lm.add_bos_token is None else {"add_special_tokens": lm.add_bos_token}
    with patch.dict(os.environ, TOKENIZERS_PARALLELISM="true"):  # commands turn it off; nothing forks in here
        return list(lm.tokenizer(list(texts), verbose=False, **options)["input_ids"])
