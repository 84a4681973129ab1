"""Every MLA architecture: what is found, and that all ways through the model agree."""

import pytest
import torch
from tiny_models import CONFIGS, WIDTH, Wobble, current, result, tiny, tokens

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_decoder, find_mla_layers, find_readers
from rolaq.quant.methods import build_method
from rolaq.quant.protection import Protection

pytestmark = current

IDS = tokens(2, 26)
CACHE_INDICES = {
    "kimi_linear": [1],
    "bailing_hybrid": [1],
    "glm5_next_text": [1],
    "mistral_large4_text": [0, 2],
    "dots3_note_text": [0, 1, 2],
}


def in_chunks(model, sizes):
    cache, parts = None, []
    for chunk in IDS.split(sizes, 1):
        output = model(chunk, cache=cache, use_cache=True)
        cache = output.cache
        parts.append(result(output))
    return torch.cat(parts, 1)


def close(a, b):
    return torch.allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers(kind):
    layers = find_mla_layers(tiny(kind))
    assert [layer.index for layer in layers] == list(range(len(layers)))
    assert [layer.cache_index for layer in layers] == CACHE_INDICES.get(kind, [0, 1])
    for layer in layers:
        weight = layer.module.kv_b_proj.weight
        assert weight.shape == (layer.heads * (layer.nope_dim + layer.v_dim), layer.latent_dim)
        assert layer.module.kv_a_proj_with_mqa.weight.shape[0] == layer.latent_dim + layer.rope_dim
        assert layer.module.kv_a_layernorm.weight.shape == (layer.latent_dim,)
        assert tiny(kind).get_submodule(layer.name) is layer.module


@pytest.mark.parametrize("kind", CONFIGS)
def test_decoder_is_the_model_that_makes_the_cache(kind):
    decoder = find_decoder(tiny(kind))
    assert type(decoder).__name__.endswith("Model") and hasattr(decoder, "layers")
    assert find_decoder(decoder) is decoder


@pytest.mark.parametrize("kind", CONFIGS)
def test_exact_changes_nothing(kind):
    model = tiny(kind)
    plain = result(model(IDS, use_cache=False)), in_chunks(model, [10, 16])
    with attach(model, build_method("bf16", d=WIDTH, layers=2), Protection(2, 5)):
        inside = result(model(IDS, use_cache=False)), in_chunks(model, [10, 16])
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_everything_protected_changes_nothing(kind):
    model = tiny(kind)
    plain = result(model(IDS))
    for protection in (
        Protection(26, 0),
        Protection(0, 26),
        Protection(0, 26, "storage"),
        Protection(0, 0, "serving"),
    ):
        with attach(model, Wobble(), protection):
            assert close(result(model(IDS)), plain)
            assert close(result(model(IDS, use_cache=False)), plain)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("budget", [(0, 0), (2, 5)])
def test_per_query_does_not_depend_on_the_chunks(kind, budget):
    model = tiny(kind)
    plain = result(model(IDS))
    with attach(model, Wobble(), Protection(*budget)):
        whole = result(model(IDS, use_cache=False))
        assert (whole - plain).abs().max() > 0.1
        assert close(result(model(IDS)), whole)
        assert close(in_chunks(model, [1, 9, 6, 10]), whole)
        assert close(in_chunks(model, [1] * 26), whole)
    assert torch.equal(result(model(IDS)), plain)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("protection", [Protection(2, 5, "storage"), Protection(2, 5, "serving")])
def test_other_readings_agree_with_per_query_while_decoding(kind, protection):
    model = tiny(kind)
    with attach(model, Wobble(), protection):
        assert close(result(model(IDS)), result(model(IDS, use_cache=False)))
        decoded = in_chunks(model, [1] * 26)
    with attach(model, Wobble(), Protection(2, 5)):
        assert close(result(model(IDS)), decoded)


def test_layers_that_reuse_latents_read_the_same_ones():
    model = tiny("mistral_large4_text")
    readers = find_readers(model)
    assert len(readers) == 2
    seen = {}
    expanding = [*(layer.module for layer in find_mla_layers(model)), *readers]
    for cached in (False, True):
        with attach(model, Wobble()):
            hooks = [
                module.kv_b_proj.register_forward_pre_hook(
                    lambda m, args, key=key: seen.update({key: args[0]})
                )
                for key, module in enumerate(expanding)
            ]
            model(IDS, use_cache=cached)
        for hook in hooks:
            hook.remove()
        assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def test_a_model_without_mla_is_named():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9
    )
    with pytest.raises(RolaqError, match="LlamaForCausalLM has no Multi-head Latent Attention"):
        find_mla_layers(LlamaForCausalLM(config))


@pytest.mark.parametrize("missing", ["kv_b_proj", "layer_idx", "v_head_dim"])
def test_a_missing_hook_point_is_named(missing):
    model = tiny("minicpm3", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    kept = getattr(attention, missing)
    setattr(attention, missing, None)
    try:
        if missing == "v_head_dim":  # still in the config
            assert find_mla_layers(model)[0].v_dim == 20
        else:
            with pytest.raises(
                RolaqError, match=rf"model.layers.0.self_attn \(MiniCPM3Attention\) .* no {missing}"
            ):
                find_mla_layers(model)
    finally:
        setattr(attention, missing, kept)
