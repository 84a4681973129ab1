"""Whether two greedy outputs are the same, up to ties that rounding may break either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from rolaq.serve.bench.proofs import Agreement

Verdict = Literal["same", "tie", "changed"]
LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
"""What a request has to ask for so that its answer can be judged."""


@dataclass(frozen=True)
class Greedy:
    """A greedy output: tokens, their log-probabilities, and by how much each led the second best token."""

    ids: list[int]
    logprobs: list[float]
    leads: list[float]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Greedy:
        """From the answer to a request with `LOGPROBS`."""
        info = answer["meta_info"]
        chosen = [(item[1], item[0]) for item in info["output_token_logprobs"]]
        leads = [top[0][0] - top[1][0] for top in info["output_top_logprobs"]]
        return cls([token for token, _ in chosen], [logprob for _, logprob in chosen], leads)


def verdict(reference: Greedy, other: Greedy, same: Agreement) -> tuple[Verdict, float]:
    """How ``other`` compares with ``reference``, and the mean difference of log-probabilities up to where they part.

    `same`: the same tokens. `tie`: they part where the two best tokens of the reference are within the margin.
    `changed`: they part elsewhere, or the log-probabilities before that have drifted.
    """
    pairs = list(zip(reference.ids, other.ids, strict=False))
    parted = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    compared = zip(reference.logprobs[:parted], other.logprobs[:parted], strict=True)
    drift = mean(abs(a - b) for a, b in compared) if parted else 0.0
    if drift > same.drift:
        return "changed", drift
    if parted == len(pairs):
        return ("same" if len(reference.ids) == len(other.ids) else "changed"), drift
    return ("tie" if reference.leads[parted] <= same.margin else "changed"), drift


def best(references: Sequence[Greedy], other: Greedy, same: Agreement) -> tuple[Verdict, float]:
    """The mildest verdict over several outputs that were seen in isolation."""
    order: list[Verdict] = ["same", "tie", "changed"]
    return min((verdict(one, other, same) for one in references), key=lambda v: (order.index(v[0]), v[1]))


def count(verdicts: Sequence[tuple[Verdict, float]]) -> dict[str, Any]:
    """How many of each verdict, and the largest drift."""
    found = Counter(name for name, _ in verdicts)
    numbers = {name: found.get(name, 0) for name in ("same", "tie", "changed")}
    return {**numbers, "drift": max((drift for _, drift in verdicts), default=0.0)}
