"""Teacher-forced KL to the BF16 model, and perplexity, by domain and length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from rolaq.eval.config import DivergenceConfig
from rolaq.quant.adapters.attach import attach
from rolaq.quant.protection import Protection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rolaq.quant.methods.base import Method


MASK_ELEMENTS = 2**31
"""Bound on a batch's attention mask ``[B, n, 2n]``: windows per query need one for each sequence."""


def batch_rows(length: int, tokens: int) -> int:
    """Sequences of ``length`` in a batch of about ``tokens`` tokens whose attention mask stays bounded."""
    return max(1, min(tokens // length, MASK_ELEMENTS // (2 * length * length)))


@dataclass
class Scores:
    """Sums over scored positions of one text: KL and next-token loss in nats, in float64."""

    kl: float = 0.0
    loss: float = 0.0
    kl_positions: int = 0
    loss_positions: int = 0
    by_document: list[float] = field(default_factory=list)

    def add(self, kl: Tensor, loss: Tensor) -> None:
        """Add a batch: ``kl [B, n]`` and ``loss [B, m]`` per scored position."""
        self.kl += kl.double().sum().item()
        self.loss += loss.double().sum().item()
        self.kl_positions += kl.numel()
        self.loss_positions += loss.numel()
        self.by_document += kl.double().mean(1).tolist()

    @property
    def mean_kl(self) -> float:
        """Mean KL(p_BF16 || p) in nats per position."""
        return self.kl / self.kl_positions

    @property
    def perplexity(self) -> float:
        """Exponential of the mean next-token loss; capped where a float64 ends."""
        return math.exp(min(self.loss / max(self.loss_positions, 1), 700.0))


def logits_of(
    model: PreTrainedModel, ids: Tensor, method: Method, protection: Protection, prefill: int
) -> Tensor:
    """Logits ``[B, n, V]`` of a teacher-forced pass whose latents are read through ``method``.

    With the ``serving`` reading the tokens pass in chunks of ``prefill``, because there only later
    chunks read the quantized cache.
    """
    with torch.no_grad(), attach(model, method, protection):
        if protection.reading != "serving":
            return model(input_ids=ids, use_cache=False).logits
        # renamed in transformers 5.17, the old name warns
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache, parts = None, []
        for chunk in ids.split(prefill, dim=1):
            output = model(input_ids=chunk, use_cache=True, **{name: cache})
            cache = output.past_key_values
            parts.append(output.logits)
        return torch.cat(parts, dim=1)


def teacher_log_probs(model: PreTrainedModel, ids: Tensor, chunk: int) -> Tensor:
    """Log-probabilities ``[B, n, V]`` fp32 of the model as it is."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    if logits.dtype == torch.float32:  # nothing else needs the logits: reuse their memory
        for part in logits.split(chunk, dim=1):
            part.copy_(part.log_softmax(-1))
        return logits
    return torch.cat([part.float().log_softmax(-1) for part in logits.split(chunk, dim=1)], dim=1)


def compare(
    teacher: Tensor, logits: Tensor | None, ids: Tensor, skip: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """KL ``[B, n - skip]`` and next-token loss ``[B, n - skip - 1]``, fp32, nats.

    Args:
        teacher: log-probabilities ``[B, n, V]`` fp32.
        logits: the student's ``[B, n, V]``, any float dtype; None stands for the teacher itself.
        ids: tokens ``[B, n]``; position t predicts token t + 1.
        skip: leading positions that are not scored.
        chunk: positions computed at once.
    """
    kls, losses = [], []
    for start in range(skip, ids.shape[1], chunk):
        stop = min(start + chunk, ids.shape[1])
        target = teacher[:, start:stop]
        student = target if logits is None else logits[:, start:stop].float().log_softmax(-1)
        kls.append(kl_div(student, target, reduction="none", log_target=True).sum(-1))
        following = ids[:, start + 1 : stop + 1]
        losses.append(nll_loss(student[:, : following.shape[1]].mT, following, reduction="none"))
    return torch.cat(kls, dim=1), torch.cat(losses, dim=1)


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    runs: Sequence[tuple[Method, Protection]],
    cfg: DivergenceConfig,
    passed: Callable[[int], object] = lambda tokens: None,
) -> list[Scores]:
    """Scores of every run on ``ids [n, length]``.

    One teacher pass per batch serves all runs, and only one batch's log-probabilities are kept: at most
    ``cfg.logits_gb``, or one sequence's.
    ``passed`` is told the tokens of every forward pass.
    """
    scores = [Scores() for _ in runs]
    fitting = int(cfg.logits_gb * 1e9 / (4 * model.get_output_embeddings().weight.shape[0]))
    for batch in ids.split(batch_rows(ids.shape[1], min(cfg.batch_tokens, fitting))):
        batch = batch.to(model.device)
        teacher = teacher_log_probs(model, batch, cfg.chunk)
        passed(batch.numel())
        for total, (method, protection) in zip(scores, runs, strict=True):
            logits = None if method.exact else logits_of(model, batch, method, protection, cfg.prefill)
            total.add(*compare(teacher, logits, batch, cfg.skip, cfg.chunk))
            passed(0 if method.exact else batch.numel())
    return scores
