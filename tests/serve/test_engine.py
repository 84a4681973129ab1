"""SGLang as installed, on a CPU: what the tests of the plugin rest on."""

from pathlib import Path

import pytest
import torch
from engine import CpuEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "testbed" / "tiny"
WORDS = "In 1914 the war began in Europe and the armies of many nations went to fight. "


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["The capital of", "Once upon a time there was a king who", WORDS * 8, WORDS * 30]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def expected(prompts):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_outputs_are_those_of_transformers(prompts, expected):
    with CpuEngine(MODEL) as engine:
        assert engine.generate(prompts, 12) == expected


def test_retracted_requests_come_back_with_the_same_text(prompts):
    # each crosses into a second page; SGLang reserves exactly what requests need that ignore the end of text
    short = [prompts[3][i : i + 60] for i in range(6)]
    with CpuEngine(MODEL) as engine:
        free = engine.generate(short, 20, ignore_eos=False)
    with CpuEngine(MODEL, max_total_tokens=512, schedule_conservativeness=0.01) as engine:
        assert engine.generate(short, 20, ignore_eos=False) == free
        assert any(request.retraction_count for request in engine.requests.values())


def test_a_failing_scheduler_is_reported(prompts):
    with CpuEngine(MODEL) as engine:
        engine.runner.forward = None
        engine.submit("fails", prompts[0])
        with pytest.raises(RuntimeError, match="scheduler failed"):
            engine.step()


def test_hooks_hold_for_their_engine_alone_and_a_failed_start_leaves_nothing(prompts):
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fail(*arguments, **named):
        raise ValueError("no pool today")

    def plugin():
        target = f"{KVCacheConfigurator.__module__}.KVCacheConfigurator._build_mla_kv_pool"
        HookRegistry.register(target, fail, HookType.REPLACE)

    with pytest.raises(ValueError, match="no pool today"):
        CpuEngine(MODEL, plugin)
    with CpuEngine(MODEL) as engine:
        assert engine.generate(prompts[:1], 2)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def engine(request):
    with CpuEngine(MODEL, disable_overlap_schedule=not request.param) as engine:
        yield engine


def test_a_repeated_prompt_is_read_from_the_prefix_cache(engine, prompts, expected):
    engine.generate(prompts, 12)
    assert engine.generate(prompts, 12) == expected
    cached = [request.cached_tokens for request in list(engine.requests.values())[-len(prompts) :]]
    assert cached == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]


def test_logits_are_those_of_transformers(engine, prompts):
    engine.submit("logits", prompts[2], 4)
    engine.run()
    tokens = prompts[2] + list(engine.requests["logits"].output_ids)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        all_logits = model(torch.tensor([tokens])).logits[0]
    found = engine.logits["logits"]
    for seen in range(len(prompts[2]), len(tokens)):
        torch.testing.assert_close(found[seen], all_logits[seen - 1], atol=2e-4, rtol=1e-4)


def test_aborted_requests_leave_nothing_behind(engine, prompts):
    for i, prompt in enumerate(prompts * 4):
        engine.submit(f"gone-{i}", prompt, 200)
    engine.step(5)
    engine.abort("gone-1")
    engine.step(3)
    assert engine.requests["gone-1"].finished()
    assert len(engine.scheduler.running_batch.reqs) > 1
    engine.abort()
    engine.run()
    assert all(
        engine.requests[f"gone-{i}"].finished() or not engine.requests[f"gone-{i}"].output_ids
        for i in range(16)
    )
    held = engine.slots.available_size() + engine.tree.evictable_size()
    assert (held, engine.tree.protected_size(), len(engine.runner.req_to_token_pool.free_slots)) == (
        4096,
        0,
        8,
    )
