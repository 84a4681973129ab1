"""Attaching and detaching: errors, hooks, gradients, dtypes."""

import pytest
import torch
from tiny_models import WIDTH, Wobble, current, result, tiny, tokens
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.methods import build_method
from rolaq.quant.protection import Protection

pytestmark = current

IDS = tokens(2, 18)


def hooks(model):
    return sum(
        len(getattr(module, kind))
        for module in model.modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
    )


@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v32", "mistral_large4_text"])
def test_no_hook_stays(kind):
    model = tiny(kind)
    before = hooks(model)
    with attach(model, Wobble()):
        assert hooks(model) > before
    assert hooks(model) == before
    with pytest.raises(ZeroDivisionError), attach(model, Wobble()):
        model(IDS)
        raise ZeroDivisionError
    assert hooks(model) == before


def test_no_hook_stays_after_a_failing_method_or_a_failing_attach():
    class Broken(Wobble):
        def reconstruct(self, latent, layer, *, start=0, valid=None):
            raise ZeroDivisionError

    model = tiny("minicpm3")
    before = hooks(model)
    with pytest.raises(ZeroDivisionError), attach(model, Broken()):
        model(IDS)
    with pytest.raises(RolaqError), attach(model, Wobble()), attach(model.model, Wobble()):
        raise AssertionError("the second attach must be refused")
    assert hooks(model) == before
    with attach(model, Wobble()):
        pass


def test_an_exact_method_installs_nothing():
    model = tiny("minicpm3")
    before = hooks(model)
    with attach(model, build_method("bf16", d=WIDTH, layers=2), Protection(1, 2)):
        assert hooks(model) == before
        assert type(model(IDS).cache.layers[0]).__name__ == "DynamicLayer"


@pytest.mark.parametrize("name", ["bf16", "rtn"])
def test_attaching_twice_is_refused(name):
    model, method = tiny("minicpm3"), build_method(name, d=WIDTH, layers=2)
    with (
        attach(model, method),
        pytest.raises(RolaqError, match="MiniCPM3Model already has a method"),
        attach(model, method),
    ):
        pass
    with attach(tiny("deepseek_v3"), method), attach(model, method):
        pass


def test_group_size_is_checked_before_anything_runs():
    model = tiny("minicpm3", num_hidden_layers=1, kv_lora_rank=96)
    with (
        pytest.raises(RolaqError, match=r"96 of model.layers.0.self_attn .* 128"),
        attach(model, build_method("rtn", d=128, layers=1)),
    ):
        pass
    assert hooks(model) == 0


def test_layer_count_is_checked():
    method = build_method("hadamard", d=WIDTH, layers=3)
    with (
        pytest.raises(RolaqError, match="hadamard has 3 rotations, the model 2"),
        attach(tiny("minicpm3"), method),
    ):
        pass


def test_latent_width_is_checked():
    method = build_method("hadamard", d=2 * WIDTH, layers=2)
    with (
        pytest.raises(RolaqError, match=f"hadamard is for latents of {2 * WIDTH}, .* has {WIDTH}"),
        attach(tiny("minicpm3"), method),
    ):
        pass


def test_a_filled_cache_of_another_origin_is_refused():
    model = tiny("minicpm3")
    plain = model(IDS).cache
    with attach(model, Wobble()):
        with pytest.raises(RolaqError, match="already holds 18 tokens from outside"):
            model(IDS, cache=plain)
        old = model(IDS).cache
    with attach(model, Wobble()), pytest.raises(RolaqError, match="already holds 18 tokens from outside"):
        model(IDS, cache=old)
    with pytest.raises(RolaqError, match="start a new cache"):
        model(IDS, cache=old)
    old.reset()
    with attach(model, Wobble()):
        assert model(IDS, cache=old).cache.get_seq_length() == 18


def test_a_cache_that_cannot_hold_latents_is_refused():
    model = tiny("minicpm3")
    static = StaticCache(config=model.config, max_cache_len=32)
    with attach(model, Wobble()):
        with pytest.raises(
            RolaqError, match=r"StaticLayer, which cannot hold .*self_attn: pass a DynamicCache"
        ):
            model(IDS, cache=static)
        with pytest.raises(RolaqError, match="tuple cannot hold latents"):
            model(IDS, cache=((None, None),))


def test_expanded_keys_in_the_cache_name_the_version():
    cache = DynamicCache()
    with attach(tiny("minicpm3"), Wobble()):
        tiny("minicpm3")(IDS, cache=cache)
        with pytest.raises(RolaqError, match=r"transformers \d.* expanded keys \[2, 4, 18, 40\].*>=5.17"):
            cache.update(torch.zeros(2, 4, 18, 40), torch.zeros(2, 4, 18, 20), 0)
        with pytest.raises(RolaqError, match="expanded keys"):
            cache.update(torch.zeros(2, 1, 18, 40), torch.zeros(2, 1, 18, 20), 0)


@pytest.mark.parametrize("shape", [(2, 17), (2, 1, 18, 18), (18,)])
def test_masks_of_other_shapes_are_refused(shape):
    with (
        attach(tiny("minicpm3"), Wobble()),
        pytest.raises(RolaqError, match=r"attention_mask is \[.*not \[batch, 18\]"),
    ):
        tiny("minicpm3")(IDS, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("reading", ["storage", "serving"])
def test_padding_after_the_text_is_refused_where_the_window_would_fall_on_it(reading):
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, 15:] = 0
    model = tiny("minicpm3")
    with (
        attach(model, Wobble(), Protection(0, 4, reading)),
        pytest.raises(RolaqError, match="pad on the left"),
    ):
        model(IDS, attention_mask=mask)
    with attach(model, Wobble(), Protection(4, 0, reading)):
        model(IDS, attention_mask=mask)


def test_other_attention_implementations():
    model = tiny("minicpm3", "flex_attention")
    with attach(model, Wobble(), Protection(0, 4)):
        with pytest.raises(
            RolaqError, match=r"attn_implementation=flex_attention .* attn_implementation=sdpa"
        ):
            model(IDS)
        with pytest.raises(RolaqError, match="attn_implementation=sdpa"):
            model(IDS, use_cache=False)


@pytest.mark.parametrize("budget", [(0, 0), (2, 5)])
def test_a_cache_that_was_not_asked_for_is_not_returned(budget):
    model = tiny("minicpm3")
    with attach(model, Wobble(), Protection(*budget)):
        asked, refused = model(IDS), model(IDS, use_cache=False)
        assert asked.cache is not None and refused.cache is None and "cache" not in refused
        parts = model.model(IDS, use_cache=False, return_dict=False)
        assert len(parts) == 1 and torch.equal(parts[0], model.model(IDS, use_cache=False).last_hidden_state)


def test_rows_of_padding_alone():
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1] = 0
    for protection in (Protection(), Protection(2, 5), Protection(2, 5, "storage")):
        with attach(tiny("minicpm3"), Wobble(), protection):
            got = result(tiny("minicpm3")(IDS, attention_mask=mask))[0]
            assert torch.allclose(got, result(tiny("minicpm3")(IDS[:1]))[0], atol=1e-4)


class Scaled(torch.nn.Module):
    """A differentiable method with one parameter."""

    name, exact = "scaled", False

    def __init__(self, value=0.8):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def reconstruct(self, latent, layer, *, start=0, valid=None):
        return latent * self.factor.to(latent.dtype)


@pytest.mark.parametrize("protection", [Protection(), Protection(2, 5), Protection(2, 5, "storage")])
def test_gradients_flow(protection):
    model = tiny("minicpm3", dtype=torch.float64)

    def loss(method):
        with attach(model, method, protection):
            return result(model(IDS, use_cache=False)).square().mean()

    method = Scaled()
    loss(method).backward()
    with torch.no_grad():
        slope = (loss(Scaled(0.8 + 1e-3)) - loss(Scaled(0.8 - 1e-3))) / 2e-3
    assert method.factor.grad == pytest.approx(float(slope), rel=1e-3)


def test_recomputed_layers_read_the_same_latents():
    """Activation checkpointing calls the layers again in the backward pass, after the model's own forward."""
    model = tiny("minicpm3", dtype=torch.float64)
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, :6] = 0

    def gradient(wrapped):
        method = Positional()
        kept = [layer.forward for layer in model.model.layers]
        if wrapped:
            for layer, forward in zip(model.model.layers, kept, strict=True):
                layer.forward = lambda *args, f=forward, **kw: checkpoint(f, *args, use_reentrant=False, **kw)
        try:
            with attach(model, method):
                result(model(IDS, attention_mask=mask, use_cache=False)).square().mean().backward()
        finally:
            for layer in model.model.layers:
                layer.__dict__.pop("forward", None)
        return method.factor.grad

    class Positional(Scaled):
        def reconstruct(self, latent, layer, *, start=0, valid=None):
            position = torch.arange(start, start + latent.shape[1], dtype=latent.dtype)
            return latent * (self.factor + 0.1 * position.cos())[:, None]

    assert torch.allclose(gradient(True), gradient(False), rtol=1e-6)


def test_layers_without_the_cache_they_need():
    layer = tiny("minicpm3").model.layers[0]
    states = torch.randn(1, 12, 64)
    rope = tiny("minicpm3").model.rotary_emb(states, torch.arange(12)[None])
    with (
        attach(tiny("minicpm3"), Wobble(), Protection(0, 4)),
        pytest.raises(RolaqError, match="reading=storage"),
    ):
        layer(states, position_embeddings=rope)
    with attach(tiny("minicpm3"), Wobble()):
        quantized = layer(states, position_embeddings=rope)
    assert not torch.allclose(quantized, layer(states, position_embeddings=rope))


def test_methods_work_in_fp32_under_autocast():
    seen = set()

    class Watching(Wobble):
        def reconstruct(self, latent, layer, *, start=0, valid=None):
            seen.add((latent @ latent.mT).dtype == latent.dtype and not torch.is_autocast_enabled("cpu"))
            return latent

    with torch.autocast("cpu", dtype=torch.bfloat16), attach(tiny("minicpm3"), Watching()):
        tiny("minicpm3")(IDS)
    assert seen == {True}


@pytest.mark.parametrize("name", ["rtn", "quarot", "kvarn", "hadamard"])
def test_bfloat16_models(name):
    model = tiny("minicpm3", dtype=torch.bfloat16)
    with attach(model, build_method(name, d=WIDTH, layers=2), Protection(2, 5)):
        output = result(model(IDS))
    assert output.dtype == torch.bfloat16 and output.isfinite().all()
