"""Generation through attached models, and what it does to their caches."""

import copy

import pytest
import torch
from tiny_models import WIDTH, Wobble, current, result, tiny, tokens
from transformers import DynamicCache

from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.methods import build_method
from rolaq.quant.protection import Protection

pytestmark = current

BUDGETS = [(0, 0), (3, 0), (2, 5)]


def method(name, layers=2):
    return Wobble() if name == "wobble" else build_method(name, d=WIDTH, layers=layers)


def generate(model, ids, new=12, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, **options)[
        :, ids.shape[1] :
    ]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["wobble", "rtn", "quarot", "hadamard"])
@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v3", "kimi_linear", "deepseek_v32", "longcat_flash"])
def test_greedy_generation_is_teacher_forcing(name, budget, kind):
    # float64, so that the two ways round latents to the same fp32 values and hence to the same codes
    model, ids = tiny(kind, dtype=torch.float64), tokens(2, 9)
    with attach(model, method(name, len(find_mla_layers(model))), Protection(*budget)):
        produced = generate(model, ids)
        forced = result(model(torch.cat((ids, produced), 1), use_cache=False))[:, 8:-1]
    assert torch.equal(forced.argmax(-1), produced)


@pytest.mark.parametrize("name", ["rtn", "kvarn"])
def test_methods_change_what_is_generated(name):
    model, ids = tiny("minicpm3"), tokens(2, 30)
    plain = generate(model, ids)
    with attach(model, method(name)):
        assert not torch.equal(generate(model, ids), plain)
    assert torch.equal(generate(model, ids), plain)


@pytest.mark.parametrize("reading", ["per_query", "storage", "serving"])
@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v2", "kimi_linear", "glm_moe_dsa"])
@pytest.mark.parametrize("name", ["wobble", "kvarn", "hadamard"])
def test_a_left_padded_batch_is_its_rows(reading, kind, name):
    model, rows = tiny(kind, dtype=torch.float64), [tokens(1, n, seed=n) for n in (11, 4, 17)]
    padded = torch.cat([torch.nn.functional.pad(row, (17 - row.shape[1], 0), value=0) for row in rows])
    mask = (padded != 0).long()
    other = torch.where(mask.bool(), padded, 7)
    with attach(model, method(name, len(find_mla_layers(model))), Protection(2, 5, reading)):
        alone = torch.cat([generate(model, row, attention_mask=torch.ones_like(row)) for row in rows])
        assert torch.equal(generate(model, padded, attention_mask=mask), alone)
        assert torch.equal(generate(model, other, attention_mask=mask), alone)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v32"])
def test_beam_search_is_the_same_with_and_without_a_cache(budget, kind):
    model, ids = tiny(kind), tokens(2, 9)
    with attach(model, Wobble(), Protection(*budget)):
        cached = generate(model, ids, num_beams=3)
        assert torch.equal(cached, generate(model, ids, num_beams=3, use_cache=False))
    assert not torch.equal(cached, generate(model, ids, num_beams=3))


@pytest.mark.parametrize("budget", BUDGETS)
def test_speculation_by_lookup_is_lossless(budget):
    # repeats make the lookup propose tokens, most of which are rejected and cropped
    model, ids = tiny("minicpm3"), tokens(1, 5).repeat(1, 4)
    with attach(model, Wobble(), Protection(*budget)):
        assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=4), generate(model, ids))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("before", "after", "kept"), [(20, 9, 24), (20, 3, 21), (20, 9, 20), (20, 1, 20), (12, 17, 13)]
)
@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v32"])
def test_crop_within_the_last_forward_leaves_no_trace(budget, before, after, kept, kind):
    model, ids, protection = tiny(kind), tokens(1, 40), Protection(*budget)
    with attach(model, recorded := Wobble(), protection):
        cache = model(ids[:, :before]).cache
        model(ids[:, before : before + after], cache=cache)
        cache.crop(kept - before - after)
        assert [layer.get_seq_length() for layer in cache.layers] == [kept] * 2
        continued = result(model(ids[:, kept:30], cache=cache))
        straight = model(ids[:, :before]).cache
        if kept > before:
            model(ids[:, before:kept], cache=straight)
        assert torch.allclose(continued, result(model(ids[:, kept:30], cache=straight)), atol=2e-4)
        for a, b in zip(cache.layers, straight.layers, strict=True):
            assert a.written == b.written and torch.allclose(a.keys, b.keys, atol=1e-4)
    assert recorded.events


@pytest.mark.parametrize("kept", [0, 1, 4, 9, 15])
def test_deeper_crops_never_quantize_again(kept):
    model, ids = tiny("minicpm3"), tokens(1, 40)
    with attach(model, recorded := Wobble(), Protection(2, 5)):
        cache = model(ids[:, :16]).cache
        for t in range(16, 20):
            model(ids[:, t : t + 1], cache=cache)
        cache.crop(kept - 20)
        # only the token that the last step had written can be brought back
        assert [layer.written for layer in cache.layers] == [min(14, kept)] * 2
        recorded.events.clear()
        model(ids[:, kept:30], cache=cache)
    assert all(start >= min(14, kept) for _, start, _, _ in recorded.events)


@pytest.mark.parametrize("budget", BUDGETS)
def test_rows_of_a_cache_can_be_moved(budget):
    model, ids = tiny("minicpm3"), tokens(3, 16)
    with attach(model, Wobble(), Protection(*budget)):
        tail = tokens(6, 7, seed=3)
        for rows, change in [
            ([2, 0, 0], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0]))),
            ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
            ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
        ]:
            moved, fresh = model(ids).cache, model(ids[rows]).cache
            change(moved)
            a, b = (result(model(tail[: len(rows)], cache=cache)) for cache in (moved, fresh))
            assert torch.allclose(a, b, atol=1e-4)


def test_a_prefix_can_be_copied_and_continued_twice():
    model, ids = tiny("minicpm3"), tokens(1, 20)
    with attach(model, Wobble(), Protection(2, 5)):
        prefix = model(ids[:, :12]).cache
        copies = [copy.deepcopy(prefix) for _ in range(2)]
        assert copies[0].layers[0].session is prefix.layers[0].session
        first, second = (result(model(ids[:, 12:], cache=cache)) for cache in copies)
        assert torch.equal(first, second) and prefix.get_seq_length() == 12
        assert torch.allclose(first, result(model(ids))[:, 12:], atol=1e-4)


def test_reset_starts_over():
    model, ids = tiny("minicpm3"), tokens(1, 20)
    with attach(model, Wobble(), Protection(2, 5)):
        cache = model(ids).cache
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(result(model(ids, cache=cache)), result(model(ids)))


@pytest.mark.parametrize("make", [lambda config: DynamicCache(), lambda config: DynamicCache(config=config)])
def test_an_empty_cache_is_taken_over_in_place(make):
    model, ids = tiny("minicpm3"), tokens(1, 20)
    with attach(model, Wobble(), Protection(2, 5)):
        cache = make(model.config)
        output = model(ids, cache=cache)
        assert output.cache is cache and cache.get_seq_length() == 20
        assert torch.equal(result(output), result(model(ids)))
        assert torch.allclose(result(output), result(model(ids, past_key_values=make(model.config))))


def test_methods_that_quantize_token_by_token_get_all_rows_at_once():
    class ByToken(Wobble):
        def by_token(self, tokens):
            return tokens < 9

    model, ids, mask = tiny("minicpm3"), tokens(3, 16), torch.ones(3, 16, dtype=torch.long)
    mask[1, :4], mask[2, :9] = 0, 0
    with attach(model, recorded := ByToken(), Protection(2, 5)):
        cache = model(ids[:, :15], attention_mask=mask[:, :15]).cache
        assert len(recorded.events) == 2 * 2  # the third row has nothing outside its window and sinks
        model(ids[:, 15:], attention_mask=mask, cache=cache)
    assert [(start, n) for _, start, n, _ in recorded.events[4:]] == [(10, 1)] * 2


def test_decoding_quantizes_one_token_a_step_and_layer():
    model, ids = tiny("minicpm3"), tokens(2, 20)
    with attach(model, recorded := Wobble(), Protection(2, 5)):
        cache = model(ids).cache
        recorded.events.clear()
        for t in range(3):
            model(ids[:, t : t + 1], cache=cache)
    assert [(layer, start, n) for layer, start, n, _ in recorded.events] == [
        (layer, 15 + t, 1) for t in range(3) for layer in range(2)
    ]
