"""What the probe changes in SGLang: against its own classes where it is installed."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from rolaq.serve.bench.probe import SKIP, record_logits, skip_attention, skipped, spans


class Mode(SimpleNamespace):
    def is_extend(self):
        return self.extend

    def is_decode(self):
        return not self.extend


def batch(rids, extend=True, **more):
    return SimpleNamespace(rids=rids, forward_mode=Mode(extend=extend), **more)


@pytest.mark.parametrize(
    ("rids", "extend", "want"),
    [
        ([f"{SKIP}a", f"{SKIP}b"], True, True),
        ([f"{SKIP}a"], False, False),
        ([f"{SKIP}a", "b"], True, False),
        ([], True, False),
        (None, True, False),
    ],
)
def test_only_prefills_of_marked_requests_skip_attention(rids, extend, want):
    assert skipped(batch(rids, extend)) is want


def test_spans_of_prefill_and_decode():
    lengths = torch.tensor([10, 300, 7])
    prefill = batch(["a", "b"], seq_lens=lengths, extend_seq_lens_cpu=[10, 44])
    assert spans(prefill) == [("a", 0, 10), ("b", 256, 300)]
    assert spans(batch(["a", "b"], False, seq_lens=lengths)) == [("a", 9, 10), ("b", 299, 300)]


def test_logits_of_every_forward_are_left_in_files(tmp_path, monkeypatch):
    class ModelRunner:
        def sample(self, output, batch):
            output.next_token_logits.zero_()  # as penalties may: the probe has to read before
            return "sampled"

    name = "sglang.srt.model_executor.model_runner"
    for part in ("sglang", "sglang.srt", "sglang.srt.model_executor", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setattr(sys.modules[name], "ModelRunner", ModelRunner, raising=False)
    path = tmp_path / "deep" / "logits.0"
    record_logits(path)
    runner, kept = ModelRunner(), []
    steps = [
        batch(["a", "b"], seq_lens=torch.tensor([5, 9]), extend_seq_lens_cpu=[5, 3]),
        batch(["b"], False, seq_lens=torch.tensor([10])),
        batch(None, False),  # a dummy batch
    ]
    for step in steps:
        # a graph may leave rows of padding behind those of the requests
        logits = torch.randn(len(step.rids or []) + 1, 6).bfloat16()
        kept.append(logits[: len(step.rids or [])].float().clone())
        assert runner.sample(SimpleNamespace(next_token_logits=logits), step) == "sampled"
    rows = np.fromfile(path, np.float32).reshape(-1, 6)
    assert np.array_equal(rows, torch.cat(kept).numpy())
    lines = [json.loads(line) for line in path.with_name("logits.0.jsonl").read_text().splitlines()]
    assert [(x["rid"], x["start"], x["end"], x["row"]) for x in lines] == [
        ("a", 0, 5, 0), ("b", 6, 9, 1), ("b", 9, 10, 2),
    ]  # fmt: skip


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's own classes with attention skipped, put back afterwards."""
    pytest.importorskip("sglang")
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor import forward_context
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    monkeypatch.setattr(RadixAttention, "forward", RadixAttention.forward)
    monkeypatch.setattr(AttentionBackendRegistry, "get_handler", AttentionBackendRegistry.get_handler)
    pool = SimpleNamespace(pending={})
    backend = SimpleNamespace(chunk=SimpleNamespace(exact_row="rows"))
    monkeypatch.setattr(forward_context, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)
    skip_attention()
    return SimpleNamespace(pool=pool, attention=RadixAttention, handlers=AttentionBackendRegistry)


@pytest.mark.parametrize("name", ["triton", "flashmla", "fa3"])
def test_marked_prefills_take_the_expanded_path(sglang, name):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    handler = sglang.handlers.get_handler(name)
    assert handler(None, batch([f"{SKIP}a"])) is AttnForwardMethod.MHA


def test_marked_prefills_attend_to_nothing_and_flush_the_packed_pool(sglang):
    layer = sglang.attention(num_heads=3, head_dim=24, scaling=1.0, num_kv_heads=3, layer_id=5, v_head_dim=16)
    q, v = torch.randn(7, 3, 24), torch.randn(7, 3, 16)
    flushed = []
    sglang.pool.flush = lambda *arguments: flushed.append(arguments)
    out = layer(q, q, v, batch([f"{SKIP}a"]), save_kv_cache=False)
    assert out.shape == (7, 48) and not out.any() and flushed == []
    sglang.pool.pending = {5: "latents"}
    layer(q, q, v, batch([f"{SKIP}a"]), save_kv_cache=False)
    assert flushed == [(5, "rows")]
