"""Fused attention for MLA's shapes, whose value heads are narrower than the key heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within it Transformers' `sdpa` pads values to the key width and cuts the result.

    Fused kernels want one width; without it PyTorch falls back to one that keeps n x n weights (three
    times slower on a CPU, and the largest part of a step's memory). The result is the same.
    """
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def padded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        width = value.shape[-1]
        wide = F.pad(value, (0, max(0, key.shape[-1] - width)))
        output, weights = original(module, query, key, wide, *args, **options)
        return output[..., :width], weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = padded
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original
