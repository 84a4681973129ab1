"""Checkpoints of random weights, against Transformers' own model of the same configuration."""

import pytest
import torch

from rolaq.common.files import find, read_json
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.artifact import Artifact
from rolaq.quant.identity import model_identity
from rolaq.serve.bench.models import DUMMY, dummy, random_checkpoint, reduced, shapes

LITE = find("pkg://rolaq.serve/bench/ds-v2-lite.json")
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 128, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "vocab_size": 61,
}  # fmt: skip


def test_the_large_shape_has_the_models_size():
    count = sum(torch.Size(shape).numel() for _, shape in shapes(read_json(LITE)))
    assert count == pytest.approx(15.7e9, rel=0.005)  # DeepSeek-V2-Lite: 15.7B parameters


def test_transformers_loads_a_random_checkpoint_completely(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, artifact = random_checkpoint({**read_json(LITE), **SMALL}, tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.arange(20)[None]).logits[0]
    assert torch.isfinite(logits).all()
    lead = logits.topk(2).values.diff(dim=-1).abs()
    assert lead.median() > 1  # nats: greedy outputs are rarely a tie
    identity = model_identity(find_mla_layers(model), model.config, "x")
    assert Artifact.load(artifact, identity).config.model.layers == 3


def test_dummy_weights_need_a_configuration_alone(tmp_path):
    model, artifact = dummy(LITE, tmp_path)
    assert [path.name for path in model.iterdir()] == ["config.json"]
    found = Artifact.load(artifact)
    assert found.rotation.shape == (27, 512, 512) and found.config.model.weights == DUMMY


def test_reduced_keeps_the_attention():
    config = reduced(LITE, 4, 16)
    names = dict(shapes(config))
    assert names["model.layers.3.self_attn.kv_b_proj.weight"] == (16 * 256, 512)
    assert "model.layers.4.input_layernorm.weight" not in names
    assert "model.layers.1.mlp.experts.16.up_proj.weight" not in names
