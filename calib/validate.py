"""Selection score: validation KL relative to OSCAR's, weighted over lengths (paper Eq. 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rolaq.calib.capture import capture_outputs, hidden_states
from rolaq.calib.losses import Head, attention_errors, vocabulary_kl
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import MLALayer


class Score(NamedTuple):
    """S, and per length the ratio r = KL / OSCAR's KL and the KL itself (nats per position)."""

    total: float
    ratios: dict[int, float]
    kl: dict[int, float]


def score(kl: Mapping[int, float], reference: Mapping[int, float], weights: Sequence[float]) -> Score:
    """`S = sum w_i r_i` over the lengths in ascending order: .5 short, .25 middle, .25 long in the paper."""
    lengths = sorted(kl)
    ratios = {length: kl[length] / reference[length] for length in lengths}
    total = sum(w * ratios[length] for w, length in zip(weights, lengths, strict=True))
    return Score(total, ratios, {length: kl[length] for length in lengths})


class Validation:
    """Teacher-forced KL to the unquantized model on fixed documents; the teacher runs once."""

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        documents: Mapping[int, Tensor],
        *,
        skip: int,
        chunk: int,
        batch_tokens: int,
    ) -> None:
        """documents: per length `[n, length]` token ids on the model's device."""
        self.model, self.head, self.skip, self.chunk = model, head, skip, chunk
        self.batches = {n: ids.split(max(1, batch_tokens // n)) for n, ids in sorted(documents.items())}
        self.teacher = {n: [self._hidden(ids) for ids in batches] for n, batches in self.batches.items()}

    @torch.no_grad()
    def _hidden(self, ids: Tensor) -> Tensor:
        return hidden_states(self.model, ids, self.skip)

    @torch.no_grad()
    def kl(self, method: Any, lengths: Sequence[int] | None = None) -> dict[int, float]:
        """Mean KL(p_BF16 || p_method) per length, or for `lengths`, over all documents' scored positions."""
        chosen = list(self.batches) if lengths is None else list(lengths)
        with attach(self.model, method):
            means = torch.stack([self._mean_kl(length) for length in chosen])
        return dict(zip(chosen, means.tolist(), strict=True))

    def _mean_kl(self, length: int) -> Tensor:
        pairs = list(zip(self.batches[length], self.teacher[length], strict=True))
        sums = [
            vocabulary_kl(self._hidden(ids), teacher, self.head, self.chunk).double() * teacher.shape[0]
            for ids, teacher in pairs
        ]
        return torch.stack(sums).sum() / sum(teacher.shape[0] for _, teacher in pairs)

    @torch.no_grad()
    def attention_errors(self, method: Any, layers: Sequence[MLALayer]) -> list[float]:
        """Relative attention-output error per layer on the first batch of the longest documents."""
        ids = self.batches[max(self.batches)][0]
        with capture_outputs(layers, self.skip) as teacher:
            self._hidden(ids)
        with attach(self.model, method), capture_outputs(layers, self.skip) as student:
            self._hidden(ids)
        return attention_errors(student.all(), teacher.all()).tolist()
