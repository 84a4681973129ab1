"""Reading rotated latents through folded projections is reading restored latents through the model's."""

import copy

import pytest
import torch
from tiny_models import tiny, tokens

from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.folding import fold, folded_projections
from rolaq.quant.geometry import projections
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.quantizer import decode
from rolaq.quant.response import gain

WIDTH = 128


def random_method(layers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(layers, WIDTH, WIDTH, generator=generator, dtype=torch.float64))[0]
    threshold = torch.linspace(0.8, 1.1, layers)
    return FourLevelMethod("rolaq", rotation, threshold, gain(threshold))


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_attention_output_is_the_same(kind):
    model, ids = tiny(kind), tokens(2, 40)
    method = random_method(len(find_mla_layers(model)))
    folded = copy.deepcopy(model)
    for layer in find_mla_layers(folded):
        projection = layer.module.kv_b_proj
        projection.weight.data = fold(projection.weight.data, method.rotation[layer.index])

        def rotated(module, args, layer=layer):
            return (decode(method.quantize(args[0], layer.index)).to(args[0].dtype),)

        projection.register_forward_pre_hook(rotated)
    with torch.no_grad():
        got = folded(ids, use_cache=False, output_hidden_states=True).hidden_states
        with attach(model, method):
            expected = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    # the first layer sees equal latents, so equal codes; fp32 sums of 128 terms in another order
    torch.testing.assert_close(got[1], expected[1], rtol=2e-4, atol=2e-5)


def test_absorbed_head_by_head():
    """q W_K R z_hat^T and (p z_hat)(W_V R)^T against float64 attention on restored latents."""
    layer = find_mla_layers(tiny("deepseek_v2"))[0]
    method = random_method(1)
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(9, WIDTH, generator=generator)
    query = torch.randn(layer.heads, layer.nope_dim, generator=generator)
    z_hat, restored = decode(method.quantize(latent, 0)), method.reconstruct(latent[None], 0)[0].double()
    w_k, w_v = (w.unflatten(0, (layer.heads, -1)) for w in projections(layer))
    logits = torch.einsum("hn,hnd,td->ht", query.double(), w_k, restored)
    expected = torch.einsum("ht,td,hvd->hv", logits.softmax(-1), restored, w_v)
    keys, values = folded_projections(layer, method.rotation[0])
    weights = (torch.einsum("hn,hnd->hd", query, keys) @ z_hat.T).softmax(-1)
    got = torch.einsum("ht,td,hvd->hv", weights, z_hat, values)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        (query[:, None] @ keys).squeeze(1) @ z_hat.T, logits.float(), rtol=1e-4, atol=1e-4
    )
