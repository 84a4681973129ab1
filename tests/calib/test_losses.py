"""Chunked KL and attention loss against full float64 computations."""

import numpy as np
import pytest
import torch

from rolaq.calib.losses import Head, attention_errors, vocabulary_kl

N, HIDDEN, VOCABULARY = 53, 16, 97


def full_kl(student, teacher, head):
    """Mean KL with all logits at once, by autograd in float64."""
    bias = 0 if head.bias is None else head.bias.double()
    log_q = torch.log_softmax(student.double() @ head.weight.double().T + bias, -1)
    log_p = torch.log_softmax(teacher.double() @ head.weight.double().T + bias, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def inputs(bias, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, N, HIDDEN, generator=generator).unbind(0)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return student, teacher, Head(weight, torch.randn(VOCABULARY, generator=generator) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
def test_value_and_gradient_equal_the_full_softmax(chunk, bias):
    student, teacher, head = inputs(bias)
    ours, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    value, expected = vocabulary_kl(ours, teacher, head, chunk), full_kl(exact, teacher, head)
    (3 * value).backward()
    (3 * expected).backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)


def test_bfloat16_states_are_scored_in_fp32():
    student, teacher, head = inputs(False)
    student, teacher = student.bfloat16(), teacher.bfloat16()
    ours = student.clone().requires_grad_()
    value = vocabulary_kl(ours, teacher, head, 10)
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(full_kl(student, teacher, head).item(), rel=1e-5)
    assert ours.grad.dtype == torch.bfloat16


def test_equal_distributions_have_zero_kl_and_no_gradient():
    student, _, head = inputs(False)
    ours = student.clone().requires_grad_()
    value = vocabulary_kl(ours, student, head, 8)
    value.backward()
    assert abs(value.item()) < 1e-6
    assert ours.grad.abs().max() < 1e-7


def test_without_gradient_nothing_is_kept():
    student, teacher, head = inputs(False)
    with torch.no_grad():
        value = vocabulary_kl(student, teacher, head, 8)
    assert not value.requires_grad
    assert value.item() == pytest.approx(full_kl(student, teacher, head).item(), rel=1e-5)


def test_logits_of_at_most_one_chunk_exist_at_once(monkeypatch):
    seen = []
    original = Head.log_probabilities
    monkeypatch.setattr(Head, "log_probabilities", lambda self, h: seen.append(len(h)) or original(self, h))
    student, teacher, head = inputs(False)
    vocabulary_kl(student.requires_grad_(), teacher, head, 8).backward()
    assert max(seen) == 8
    assert sum(seen) == 2 * N  # student and teacher once each: nothing is recomputed


def test_attention_errors_against_numpy():
    draw = np.random.default_rng(0)
    shapes = [(2, 5, 8), (1, 3, 4)]
    outputs, references = ([draw.normal(size=s) for s in shapes] for _ in range(2))
    expected = [
        np.linalg.norm(y - ref) ** 2 / np.linalg.norm(ref) ** 2
        for y, ref in zip(outputs, references, strict=True)
    ]
    ours = attention_errors([torch.tensor(y) for y in outputs], [torch.tensor(r) for r in references])
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)
