"""What attached attentions compute, against absorbed attention in float64 that decides every (query, token) alone."""

import numpy as np
import pytest
import torch
from tiny_models import Wobble, current, result, tiny, tokens
from transformers import DynamicCache

from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.protection import Protection

pytestmark = current

LENGTH = 23


class Tape:
    """Inputs and outputs of every attention over the forwards of one sequence."""

    def __init__(self, model):
        self.layers = find_mla_layers(model)
        self.inputs = [[] for _ in self.layers]
        self.outputs = [[] for _ in self.layers]
        self.rope = []

    def __enter__(self):
        self.handles = []
        for layer in self.layers:
            hook = self._hook(layer.index)
            self.handles.append(layer.module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def _hook(self, index):
        def hook(module, args, kwargs, output):
            self.inputs[index].append(kwargs["hidden_states"])
            self.outputs[index].append(output[0])
            if index == 0:
                self.rope.append(kwargs["position_embeddings"])

        return hook


def sees_exact(protection, query, token, chunk):
    """Whether a query reads a token exact; `chunk` is the (first, end) of the forward that computes the query."""
    first, end = chunk
    if token < protection.sink:
        return True
    if protection.reading == "per_query":
        return query - token < protection.recent
    if protection.reading == "serving" and end - first > 1:
        return token >= first - protection.recent
    return token >= end - protection.recent


def rotate(x, cos, sin):
    """RoPE on halves, `[..., n, d_r]` by `[n, d_r]`."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def expected(layer, states, rope, chunks, protection, method):
    """Attention output `[n, hidden]` of one row: absorbed form, float64, one pair at a time."""
    module = layer.module
    n, heads, nope = states.shape[0], layer.heads, layer.nope_dim
    query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(states)))
    query = query.view(n, heads, nope + layer.rope_dim).transpose(0, 1)
    latent, key = module.kv_a_proj_with_mqa(states).split([layer.latent_dim, layer.rope_dim], -1)
    latent = module.kv_a_layernorm(latent)
    rotated, key = rotate(query[..., nope:], *rope), rotate(key, *rope)
    weight = module.kv_b_proj.weight.view(heads, nope + layer.v_dim, layer.latent_dim).double().numpy()
    stored = method.at(latent, torch.arange(n), layer.index)
    exact, stored, key, query, rotated = (
        x.double().numpy() for x in (latent, stored, key, query[..., :nope], rotated)
    )
    output = np.zeros((n, heads, layer.v_dim))
    for first, end in chunks:
        for q in range(first, end):
            read = [
                (exact if sees_exact(protection, q, t, (first, end)) else stored)[t] for t in range(q + 1)
            ]
            for h in range(heads):
                absorbed = query[h, q] @ weight[h, :nope]
                logits = (
                    np.array([absorbed @ c + rotated[h, q] @ key[t] for t, c in enumerate(read)])
                    * module.scaling
                )
                share = np.exp(logits - logits.max())
                output[q, h] = weight[h, nope:] @ (share @ np.array(read) / share.sum())
    return output.reshape(n, -1) @ module.o_proj.weight.double().numpy().T


def bounds(sizes):
    ends = np.cumsum(sizes)
    return [(int(e) - s, int(e)) for s, e in zip(sizes, ends, strict=True)]


def check(model, ids, sizes, protection, mask=None, starts=(0,), **options):
    """Run `ids` in chunks under a wobble and compare every layer with the reference, row by row."""
    method = Wobble()
    with Tape(model) as tape, attach(model, method, protection):
        cache = None
        for first, end in bounds(sizes):
            padding = None if mask is None else mask[:, :end]
            position = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, first:end]
            output = model(
                ids[:, first:end], attention_mask=padding, position_ids=position, cache=cache, **options
            )
            cache = output.cache
    for layer in tape.layers:
        states, got = torch.cat(tape.inputs[layer.index], 1), torch.cat(tape.outputs[layer.index], 1)
        rope = [torch.cat(part, 1) for part in zip(*tape.rope, strict=True)]
        for row in range(ids.shape[0]):
            start = starts[row % len(starts)]
            chunks = [(max(a - start, 0), b - start) for a, b in bounds(sizes) if b > start]
            own = [part[row % part.shape[0], start:] for part in rope]
            want = expected(layer, states[row, start:], own, chunks, protection, method)
            np.testing.assert_allclose(got[row, start:].numpy(), want, atol=2e-5)
    return method, cache


BUDGETS = [(0, 0), (3, 0), (0, 5), (2, 6), (4, 16), (0, 1), (30, 3), (1, 40)]
CHUNKS = [[LENGTH], [9, 14], [14, 1, 1, 7], [1] * LENGTH]


@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
def test_cached_forwards(reading, budget, sizes):
    check(tiny("minicpm3"), tokens(1, LENGTH), sizes, Protection(*budget, reading))


@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("budget", [(0, 0), (2, 6), (3, 0)])
def test_without_a_cache(reading, budget):
    check(tiny("minicpm3"), tokens(2, LENGTH), [LENGTH], Protection(*budget, reading), use_cache=False)


@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("sizes", [[LENGTH], [10, 13], [20, 1, 1, 1]], ids=str)
def test_eager_attention(reading, sizes):
    check(tiny("minicpm3", "eager"), tokens(1, LENGTH), sizes, Protection(2, 6, reading))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("budget", [(0, 0), (2, 6), (3, 0)])
@pytest.mark.parametrize("sizes", [[LENGTH], [11, 12], [19, 1, 3]], ids=str)
def test_left_padding(attention, reading, budget, sizes):
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :4], mask[2, :9] = 0, 0
    check(
        tiny("minicpm3", attention), tokens(3, LENGTH), sizes, Protection(*budget, reading), mask, (0, 4, 9)
    )


@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("sizes", [[LENGTH], [9, 1, 13], [1] * LENGTH], ids=str)
def test_every_token_is_quantized_once_when_it_leaves(reading, sizes):
    protection = Protection(2, 6, reading)
    method, cache = check(tiny("minicpm3"), tokens(1, LENGTH), sizes, protection)
    for layer in (0, 1):
        written = [
            t for index, start, n, _ in method.events if index == layer for t in range(start, start + n)
        ]
        assert written == list(range(2, LENGTH - 6))
        assert cache.layers[layer].written == LENGTH - 6
    chunks_that_write = sum(end - 6 > 2 and end - 6 > max(first - 6, 2) for first, end in bounds(sizes))
    assert len(method.events) == 2 * chunks_that_write


def test_what_the_cache_holds():
    model, ids, protection = tiny("deepseek_v3"), tokens(1, 30), Protection(3, 7, "storage")
    plain = DynamicCache(config=model.config)
    with attach(model, Wobble(strength=0.0), Protection(100, 0)):
        exact = model(ids).cache.layers[0].keys
    model(ids, cache=plain)
    with attach(model, method := Wobble(), protection):
        held = model(ids).cache.layers[0]
    assert torch.equal(held.values, plain.layers[0].values)
    assert torch.equal(exact, plain.layers[0].keys)
    assert torch.equal(held.keys[:, :, :3], exact[:, :, :3])
    assert torch.equal(held.keys[:, :, 23:], exact[:, :, 23:])
    wobbled = method.at(exact[:, 0, 3:23], torch.arange(3, 23), 0)
    assert torch.allclose(held.keys[:, 0, 3:23], wobbled)


@pytest.mark.parametrize("cached", [True, False])
def test_padding_after_the_text(cached):
    model, ids, protection = tiny("minicpm3"), tokens(1, 20), Protection(2, 6)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, 15:] = 0
    with attach(model, Wobble(), protection):
        short = result(model(ids[:, :15], use_cache=cached))
        long = result(model(ids, attention_mask=mask, use_cache=cached))
    assert torch.allclose(short, long[:, :15], atol=1e-4)
