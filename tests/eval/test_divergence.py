"""KL and perplexity against NumPy in float64."""

import math

import numpy as np
import pytest
import torch

from rolaq.eval.config import DivergenceConfig
from rolaq.eval.divergence import batch_rows, compare, logits_of, measure, teacher_log_probs
from rolaq.eval.methods import build, load_artifacts
from rolaq.eval.quality import numbers
from rolaq.quant.protection import Protection


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(teacher, student, ids, skip):
    """KL of positions >= skip, and loss of those that have a next token."""
    p, q = log_softmax(teacher), log_softmax(student)
    kl = (np.exp(p) * (p - q)).sum(-1)[:, skip:]
    rows, positions = np.meshgrid(np.arange(ids.shape[0]), np.arange(skip, ids.shape[1] - 1), indexing="ij")
    return kl, -q[rows, positions, ids[rows, positions + 1]]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("skip", [0, 5, 28, 29])
def test_kl_and_loss_agree_with_numpy(chunk, skip):
    generator = torch.Generator().manual_seed(skip)
    teacher, student = (3 * torch.randn(2, 30, 50, generator=generator) for _ in range(2))
    ids = torch.randint(0, 50, (2, 30), generator=generator)
    kl, loss = compare(teacher.log_softmax(-1), student, ids, skip, chunk)
    wanted = reference(teacher.numpy(), student.numpy(), ids.numpy(), skip)
    # fp32: sums of 50 products of relative error 6e-8
    np.testing.assert_allclose(kl.numpy(), wanted[0], rtol=3e-5, atol=3e-6)
    np.testing.assert_allclose(loss.numpy(), wanted[1], rtol=3e-5, atol=3e-6)


def entries_of(target, workspace, *names):
    from .conftest import load

    cfg = load(workspace)[0]
    calibrated = load_artifacts(names, target, cfg, artifacts=str(workspace / "artifacts"))
    return {entry.name: entry for entry in build(names, target, calibrated, best_gain=1.1)}


def test_measure_against_numpy_on_a_model(target, workspace):
    entries = entries_of(target, workspace, "bf16", "rtn", "rolaq")
    ids = torch.randint(1, 250, (3, 40), generator=torch.Generator().manual_seed(0))
    runs = [(entries["rtn"].method, Protection()), (entries["rolaq"].method, Protection(4, 8))]
    cfg = DivergenceConfig(passes=[], skip=16, batch_tokens=80, chunk=11)
    passed = []
    found = measure(target.model, ids, runs, cfg, passed.append)
    with torch.no_grad():
        teacher = target.model(ids).logits.numpy()
    for (method, protection), scores in zip(runs, found, strict=True):
        kl, loss = reference(
            teacher, logits_of(target.model, ids, method, protection, 256).numpy(), ids.numpy(), 16
        )
        row = numbers(scores)
        assert row["kl"] == pytest.approx(kl.mean(), rel=1e-5) and kl.mean() > 0.01
        assert row["kl_stderr"] == pytest.approx(kl.mean(1).std(ddof=1) / math.sqrt(3), rel=1e-4)
        assert row["ppl"] == pytest.approx(np.exp(loss.mean()), rel=1e-5)
        assert (row["documents"], row["positions"]) == (3, 3 * 24)
    assert sum(passed) == 3 * ids.numel()


@pytest.mark.parametrize("budget", ["0+0", "4+16"])
def test_bf16_has_no_divergence_at_all(target, workspace, budget):
    method = entries_of(target, workspace, "bf16")["bf16"].method
    ids = torch.randint(1, 250, (2, 48), generator=torch.Generator().manual_seed(1))
    protection = Protection.parse(budget)
    (scores,) = measure(target.model, ids, [(method, protection)], DivergenceConfig(passes=[]))
    assert scores.mean_kl == 0.0
    # not by shortcut only: an attached exact method leaves the model's logits as they are
    teacher = teacher_log_probs(target.model, ids, 1024)
    kl, _ = compare(teacher, logits_of(target.model, ids, method, protection, 256), ids, 0, 1024)
    assert kl.abs().max() == 0.0


def test_everything_protected_is_exact(target, workspace):
    method = entries_of(target, workspace, "rtn")["rtn"].method
    ids = torch.randint(1, 250, (1, 32), generator=torch.Generator().manual_seed(2))
    (scores,) = measure(target.model, ids, [(method, Protection(0, 32))], DivergenceConfig(passes=[]))
    # the same numbers through two views of the keys: fp32 rounding is all that may differ
    assert scores.mean_kl < 1e-8


def test_serving_reads_the_cache_in_later_chunks(target, workspace):
    method = entries_of(target, workspace, "rolaq")["rolaq"].method
    ids = torch.randint(1, 250, (1, 64), generator=torch.Generator().manual_seed(3))
    protection = Protection(0, 0, "serving")
    with torch.no_grad():
        exact = target.model(ids).logits
    served = logits_of(target.model, ids, method, protection, prefill=32)
    torch.testing.assert_close(served[:, :32], exact[:, :32], rtol=1e-4, atol=1e-4)
    assert (served[:, 32:] - exact[:, 32:]).abs().max() > 0.01


def test_bfloat16_logits_are_compared_in_fp32():
    logits = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.randint(0, 64, (1, 20))
    kl, _ = compare(logits.float().log_softmax(-1), logits, ids, 0, 8)
    assert kl.dtype == torch.float32 and kl.abs().max() == 0.0


@pytest.mark.parametrize(
    ("length", "tokens", "rows"),
    [(2048, 131072, 64), (1024, 100, 1), (1024, 2**30, 1024), (16384, 2**20, 4), (65536, 2**20, 1)],
)
def test_batches_keep_masks_bounded(length, tokens, rows):
    assert batch_rows(length, tokens) == rows
