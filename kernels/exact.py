"""Protected tokens: sinks and recent tokens whose BF16 latents decode reads instead of packed rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Exact(NamedTuple):
    """Protected tokens' BF16 latents, in the basis of the queries.

    latents `[n, d]` BF16. where `[B, sink + recent]` int32: entry i < sink is the row of position i,
    entry sink + k the row of position `length - recent + k`. counts `[B, 2]` int32: how many sinks
    (from the first on) and recent tokens (up to the last) are in use; the others are read packed.
    `sink + recent` is at most 64.
    """

    latents: Tensor
    where: Tensor
    counts: Tensor
    sink: int
    recent: int
