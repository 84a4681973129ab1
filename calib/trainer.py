"""One optimisation step: teacher, student, loss, backward, projection (paper §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rolaq.calib.capture import capture_outputs, hidden_states
from rolaq.calib.config import CalibConfig
from rolaq.calib.losses import Head, attention_errors, vocabulary_kl
from rolaq.calib.recompute import (
    MEMORY_SHARE,
    decoder_layers,
    estimate_bytes,
    free_bytes,
    recompute,
    saved_bytes,
)
from rolaq.calib.schedule import learning_rate
from rolaq.calib.student import Student
from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import MLALayer

METRICS = ("loss", "kl", "attention", "grad_norm")


class States(NamedTuple):
    """One forward pass at the scored positions: `hidden [N, hidden]`, attention outputs per layer."""

    hidden: Tensor
    outputs: list[Tensor]


class Trainer:
    """Steps the student; nothing in a step waits for the device."""

    def __init__(
        self, model: nn.Module, layers: Sequence[MLALayer], student: Student, head: Head, config: CalibConfig
    ) -> None:
        self.model, self.layers, self.student, self.head, self.config = model, layers, student, head, config
        self.use_kl, self.use_attention = config.objective != "attn", config.objective != "kl"
        self.optimizer = torch.optim.Adam(_groups(student, config), betas=config.betas)
        self.recomputed = decoder_layers(model, layers) if self._must_recompute() else []

    def step(self, ids: Tensor, index: int) -> Tensor:
        """Optimise on `ids [B, n]` as step `index`; returns `METRICS` as `[4]` on the device."""
        self._set_learning_rates(index)
        with torch.no_grad():
            teacher = self._states(ids)
        with ExitStack() as stack:
            stack.enter_context(attach(self.model, self.student.method()))
            stack.enter_context(recompute(self.recomputed))
            terms = self._losses(self._states(ids), teacher)
            terms[0].backward()
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.student.project()
        return torch.stack([*terms, norm]).detach()

    def _states(self, ids: Tensor) -> States:
        layers = self.layers if self.use_attention else []
        with capture_outputs(layers, self.config.skip) as outputs:
            hidden = hidden_states(self.model, ids, self.config.skip)
        return States(hidden, outputs.all())

    def _losses(self, student: States, teacher: States) -> tuple[Tensor, Tensor, Tensor]:
        """Total, KL and attention loss (Eq. 8); an unused term is zero."""
        kl = attention = self.head.weight.new_zeros(())
        if self.use_kl:
            kl = vocabulary_kl(student.hidden, teacher.hidden, self.head, self.config.chunk)
        if self.use_attention:
            attention = attention_errors(student.outputs, teacher.outputs).mean().to(kl.device)
        return kl + (self.config.attention_weight if self.use_kl else 1.0) * attention, kl, attention

    def _set_learning_rates(self, index: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.config.steps, group["peak"], self.config.warmup)

    def _must_recompute(self) -> bool:
        if self.config.checkpointing != "auto":
            return self.config.checkpointing == "on"
        length = max(self.config.used_lengths)
        estimate = estimate_bytes(self._activation_bytes, self.config.tokens_per_step // length, length)
        return estimate > MEMORY_SHARE * free_bytes(self.head.weight.device)

    def _activation_bytes(self, tokens: int) -> int:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.head.weight.device)
        fixed = [*self.model.parameters(), *self.model.buffers(), *self.student.parameters()]
        method = self.student.method()
        with attach(self.model, method):
            return saved_bytes(lambda: self._states(ids).hidden, [*fixed, *method.parameters])


def _groups(student: Student, config: CalibConfig) -> list[dict]:
    """Adam's parameter groups with their peak learning rates; `RolaqError` if nothing is learned."""
    groups = [
        {"params": student.rotation_parameters(), "peak": config.lr_rotation},
        {"params": student.range_parameters(), "peak": config.lr_threshold},
    ]
    groups = [{**group, "lr": group["peak"]} for group in groups if group["params"]]
    if not groups:
        raise RolaqError(
            "nothing to learn: quant.rotation=fixed, quant.threshold=fixed and a gain that is not free; change one"
        )
    return groups
