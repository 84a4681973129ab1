"""Padding the values changes nothing but the kernel."""

import pytest
import torch

from rolaq.calib.attention import fused_attention


@pytest.mark.parametrize("v_dim", [16, 48, 64])  # narrower than, equal to and wider than the keys
def test_same_logits_with_padded_values(make_model, v_dim):
    model, ids = make_model(v_head_dim=v_dim), torch.arange(1, 65)[None]
    before = model(ids).logits
    with fused_attention():
        padded = model(ids).logits
    torch.testing.assert_close(padded, before, rtol=1e-4, atol=1e-3)
    assert torch.equal(model(ids).logits, before)
