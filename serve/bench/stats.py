"""From streamed timestamps to throughput, percentiles and averages over an interval."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rolaq.common.errors import RolaqError


@dataclass
class Timeline:
    """One streamed request.

    Attributes:
        sent: when it was sent, seconds.
        samples: (seconds, tokens generated until then), as the client saw them.
        ids: the generated tokens.
        info: the last chunk's ``meta_info``.
        error: what went wrong, or None.
    """

    sent: float = 0.0
    samples: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    info: dict = field(default_factory=dict)
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds to the first token; None where none came."""
        return self.samples[0][0] - self.sent if self.samples else None

    def when(self, tokens: int) -> float:
        """When so many tokens were there, interpolated."""
        counts = [count for _, count in self.samples]
        at = bisect_left(counts, tokens)
        if at == len(counts):
            raise RolaqError(
                f"a request ended after {counts[-1] if counts else 0} tokens, {tokens} were asked for"
            )
        if at == 0 or counts[at] == tokens:
            return self.samples[at][0]
        (before, low), (after, high) = self.samples[at - 1], self.samples[at]
        return before + (after - before) * (tokens - low) / (high - low)

    def count(self, time: float) -> float:
        """Tokens at a time between the first and the last sample, interpolated."""
        at = bisect_left(self.samples, (time, 0))
        if at == 0:
            return self.samples[0][1]
        if at == len(self.samples):
            return self.samples[-1][1]
        (before, low), (after, high) = self.samples[at - 1], self.samples[at]
        return low + (high - low) * (time - before) / (after - before)


def throughput(lines: Sequence[Timeline], drop: int, windows: int = 5) -> float:
    """Tokens per second of all requests together while every one of them decodes, the median of `windows`.

    It begins when the last request has its first ``drop`` tokens and ends when the first one ends.

    Raises:
        RolaqError: there is no such time.
    """
    begin = max(line.when(drop) for line in lines)
    end = min(line.samples[-1][0] for line in lines)
    if end <= begin:
        raise RolaqError("the requests did not decode at the same time: generate more tokens (decode.tokens)")
    edges = [begin + (end - begin) * k / windows for k in range(windows + 1)]
    counts = [sum(line.count(edge) for line in lines) for edge in edges]
    step = (end - begin) / windows
    return median((late - early) / step for early, late in pairwise(counts))


def over_interval(by_context: Mapping[int, float], begin: int, end: int) -> float:
    """Throughput while the context grows from ``begin`` to ``end`` tokens: the harmonic mean.

    The time of a step is taken as linear between the measured contexts, which attention over a cache is.

    Raises:
        RolaqError: the measured contexts do not cover the interval.
    """
    known = sorted(by_context)
    if not known or known[0] > begin or known[-1] < end:
        raise RolaqError(f"the interval {begin} to {end} is not covered by the contexts {known}")
    points = [begin, *(n for n in known if begin < n < end), end]
    times = [_step(by_context, known, n) for n in points]
    area = sum((n - m) * (a + b) / 2 for (m, a), (n, b) in pairwise(zip(points, times, strict=True)))
    return (end - begin) / area


def _step(by_context: Mapping[int, float], known: Sequence[int], context: int) -> float:
    """Seconds a token at ``context``."""
    at = bisect_left(known, context)
    if known[at] == context:
        return 1 / by_context[context]
    low, high = known[at - 1], known[at]
    share = (context - low) / (high - low)
    return (1 - share) / by_context[low] + share / by_context[high]


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least ``q`` per cent do not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(q / 100 * len(values))) - 1]


@dataclass(frozen=True)
class Bound:
    """A time, or where a burst was cut off before it was known, what it is at least."""

    value: float
    at_least: bool = False


def first_tokens(times: Sequence[float | None], requests: int, q: float, cut: float) -> Bound:
    """Percentile of the time to the first token of ``requests`` simultaneous requests, from a larger burst.

    Admission is first come, first served and prefill goes before decode, so the first ``requests`` of a burst
    see what they would see alone. ``cut`` is when the burst was cut off; None is a request that had no token.
    """
    known = sorted(time for time in times if time is not None)
    rank = max(1, math.ceil(q / 100 * requests))
    return Bound(known[rank - 1]) if rank <= len(known) else Bound(cut, at_least=True)
