"""The selection score and the validation KL."""

import pytest
import torch

from rolaq.calib.capture import hidden_states, output_head
from rolaq.calib.validate import Validation, score
from rolaq.quant.adapters.attach import attach


def test_score_is_the_weighted_mean_of_ratios():
    kl, reference = {2048: 0.3, 512: 0.2, 4096: 0.5}, {512: 0.4, 2048: 0.6, 4096: 2.0}
    result = score(kl, reference, (0.5, 0.25, 0.25))
    assert result.ratios == {512: 0.5, 2048: 0.5, 4096: 0.25}
    assert result.total == pytest.approx(0.5 * 0.5 + 0.25 * 0.5 + 0.25 * 0.25)
    assert score(reference, reference, (0.5, 0.25, 0.25)).total == 1


@pytest.mark.parametrize("batch_tokens", [32, 128, 10_000])
def test_validation_kl_equals_full_logits(model, make_student, batch_tokens):
    documents = {
        n: torch.randint(1, 4000, (3, n), generator=torch.Generator().manual_seed(n)) for n in (32, 64)
    }
    method = make_student().method()
    validation = Validation(model, output_head(model), documents, skip=4, chunk=13, batch_tokens=batch_tokens)
    for length, kl in validation.kl(method).items():
        with torch.no_grad():
            log_p = model(documents[length]).logits[:, 4:].double().log_softmax(-1)
            with attach(model, method):
                log_q = model(documents[length], use_cache=False).logits[:, 4:].double().log_softmax(-1)
        assert kl == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-4)


def test_attention_error_is_zero_without_quantization_and_positive_with(model, layers, make_student):
    documents = {32: torch.randint(1, 4000, (2, 32), generator=torch.Generator().manual_seed(0))}
    validation = Validation(model, output_head(model), documents, skip=4, chunk=64, batch_tokens=64)
    errors = validation.attention_errors(make_student().method(), layers)
    assert len(errors) == len(layers)
    assert all(0 < error < 2 for error in errors)


def test_hidden_states_leave_the_model_as_it_was(model):
    ids = torch.arange(1, 33)[None]
    before = model(ids).logits
    assert hidden_states(model, ids, 4).shape == (28, 64)
    assert torch.equal(model(ids).logits, before)
