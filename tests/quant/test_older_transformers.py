"""What holds in every supported version of transformers, whether it caches latents or expanded keys."""

import pytest
import torch
from tiny_models import Wobble, result, tiny, tokens

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.protection import Protection

IDS = tokens(2, 18)
KINDS = ["deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_without_a_cache(kind):
    model = tiny(kind)
    plain = result(model(IDS, use_cache=False))
    for protection in (Protection(), Protection(3, 0), Protection(2, 5, "storage")):
        with attach(model, Wobble(), protection):
            assert (result(model(IDS, use_cache=False)) - plain).abs().max() > 0.1
    assert torch.equal(result(model(IDS, use_cache=False)), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [(0, 0), (2, 5)])
def test_forwards_with_a_cache_agree_or_name_the_version(kind, budget):
    model = tiny(kind)
    with attach(model, Wobble(), Protection(*budget)):
        try:
            whole, cache, parts = result(model(IDS, use_cache=True)), None, []
        except RolaqError as error:
            assert ">=5.17" in str(error) and not hasattr(model.model.layers[0].self_attn, "expand_kv")
            return
        for chunk in IDS.split([7, 1, 10], 1):
            output = model(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(result(output))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-4)
