"""Padding the values changes nothing but the kernel."""

import pytest
import torch
from tiny_models import tiny, tokens

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.fused import fused_attention
from rolaq.quant.methods import build_method
from rolaq.quant.protection import Protection


@pytest.mark.parametrize("v_dim", [20, 40, 64])  # narrower than, equal to and wider than the keys
def test_same_logits_with_padded_values(v_dim):
    model, ids = tiny("deepseek_v2", attention="sdpa", v_head_dim=v_dim), tokens(2, 50)
    before = model(ids).logits
    with fused_attention():
        padded = model(ids).logits
    torch.testing.assert_close(padded, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(ids).logits, before)


def test_same_logits_with_a_window_per_query():
    model, ids = tiny("deepseek_v2", attention="sdpa"), tokens(2, 50)
    method = build_method("hadamard", d=128, layers=2)
    with attach(model, method, Protection(2, 5)):
        before = model(ids).logits
        with fused_attention():
            torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_undone_after_an_error():
    model, ids = tiny("deepseek_v2", attention="sdpa"), tokens(1, 20)
    before = model(ids).logits
    with pytest.raises(RolaqError), fused_attention():
        raise RolaqError("stop")
    assert torch.equal(model(ids).logits, before)
