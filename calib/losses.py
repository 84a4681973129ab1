"""Calibration losses: vocabulary KL in chunks and attention-output error (paper Eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Head(NamedTuple):
    """Output embedding of the frozen model: `weight [V, hidden]`, `bias [V]` or None, fp32."""

    weight: Tensor
    bias: Tensor | None = None

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Next-token log-probabilities `[n, V]` of `hidden [n, hidden]`, in the head's precision."""
        return F.log_softmax(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias), dim=-1)


class _ChunkedKL(torch.autograd.Function):
    """Sum over positions of KL(p_teacher || p_student), with its gradient taken chunk by chunk.

    The head is frozen, so the only gradient is the one to the student's hidden states,
    `(q - p) W`. It is formed while the chunk's logits are alive: no logits are kept for the
    backward pass and none are computed a second time.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Head, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=head.weight.dtype, device=student.device)
        grad = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for start in range(0, student.shape[0], chunk):
            part = slice(start, start + chunk)
            log_p = head.log_probabilities(teacher[part])
            log_q = head.log_probabilities(student[part])
            p = log_p.exp()
            total += (p * log_p.sub_(log_q)).sum()
            if grad is not None:
                grad[part] = log_q.exp_().sub_(p) @ head.weight
        ctx.save_for_backward(*(() if grad is None else (grad,)))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None


def vocabulary_kl(student: Tensor, teacher: Tensor, head: Head, chunk: int) -> Tensor:
    """Mean KL(p_teacher || p_student) over positions: L_KL of Eq. 8, a scalar in the head's precision.

    student, teacher `[n, hidden]`: the inputs of the output embedding at the scored positions.
    Logits of at most `chunk` positions exist at once, in the forward and in the backward pass.
    """
    return _ChunkedKL.apply(student, teacher, head, chunk) / student.shape[0]


def relative_error(output: Tensor, reference: Tensor) -> Tensor:
    """`||Y - Y_ref||_F^2 / ||Y_ref||_F^2` of two equally shaped tensors, a scalar in fp32 or above."""
    precision = torch.promote_types(reference.dtype, torch.float32)
    reference = reference.to(precision)
    return (output.to(precision) - reference).square().sum() / reference.square().sum()


def attention_errors(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> Tensor:
    """Relative output error of every layer, `[L]`: the terms of L_attn in Eq. 8.

    outputs, references: one tensor per layer, attention outputs after W_O at the scored positions.
    """
    errors = [relative_error(y, ref) for y, ref in zip(outputs, references, strict=True)]
    return torch.stack([error.to(errors[0].device) for error in errors])
