"""Prompts that SGLang hands to the model unchecked, and that would end its process: ids outside the vocabulary."""

from __future__ import annotations

from typing import Any


def check_ids(result: Any, manager: Any, request: Any, input_ids: Any, *arguments: Any, **named: Any) -> None:
    """After SGLang's own checks of a request: its token ids are in the vocabulary.

    An id beyond the embedding is an error on the GPU, which no process survives. Raises ValueError, which SGLang
    answers with status 400.
    """
    if input_ids is None or not len(input_ids):
        return
    size, low, high = manager.model_config.vocab_size, min(input_ids), max(input_ids)
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"The input_ids contain {wrong}, which is not in the vocabulary (0 to {size - 1}).")
