"""What a prefill step needs to know of its sequences' cached prefixes, built once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """A stretch of cached tokens of every sequence, one sequence after the other.

    slots `[n]` int64; bounds `[B + 1]` int32 between the sequences; longest: most tokens of one sequence;
    places `[p]` int64 and rows `[p]` int64: which of the tokens are protected, and their exact rows (or -1).
    """

    slots: Tensor
    bounds: Tensor
    longest: int
    places: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Prefill:
    """One prefill step: bounds of its own tokens, where each is kept exactly, and the prefix in chunks."""

    bounds: Tensor
    longest: int
    exact_row: Tensor
    chunks: list[Chunk]


def bounds_of(lengths: list[int], device: torch.device) -> Tensor:
    """Running sums `[B + 1]` int32, from 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def split(prefixes: list[int], capacity: int) -> list[list[tuple[int, int]]]:
    """Token ranges `(begin, end)` of each sequence, chunk by chunk, with at most `capacity` tokens a chunk
    (and at least one of every sequence that has some left)."""
    chunks, begin = [], 0
    while begin < max(prefixes, default=0):
        active = sum(p > begin for p in prefixes)
        end = begin + max(capacity // active, 1)
        chunks.append([(min(begin, p), min(end, p)) for p in prefixes])
        begin = end
    return chunks


def positions(ranges: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and position of every token of the ranges, `[n]` int64 each."""
    begin, end = torch.tensor(ranges, dtype=torch.int64, device=device).unbind(1)
    total = sum(b - a for a, b in ranges)
    sequence = torch.repeat_interleave(
        torch.arange(len(ranges), device=device), end - begin, output_size=total
    )
    start = (end - begin).cumsum(0) - (end - begin)
    return sequence, begin[sequence] + torch.arange(total, device=device) - start[sequence]


def overlay(
    ranges: list[tuple[int, int]], prefixes: list[int], sink: int, recent: int
) -> tuple[list[int], list[int]]:
    """Protected tokens among those of a chunk: their places in it, and their entries in the flattened
    `[B, sink + recent]` windows of the prefixes."""
    places, entries, start = [], [], 0
    for b, ((begin, end), prefix) in enumerate(zip(ranges, prefixes, strict=True)):
        window = b * (sink + recent)
        tail = max(prefix - recent, sink)
        for token in (*range(begin, min(end, sink)), *range(max(begin, tail), end)):
            places.append(start + token - begin)
            entries.append(window + (token if token < sink else sink + token - prefix + recent))
        start += end - begin
    return places, entries
