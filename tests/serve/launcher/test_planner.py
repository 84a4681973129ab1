"""The capacity planner against counts by hand, SGLang's own memory fractions, and a measured server."""

import json

import pytest
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

from rolaq.common.config import Geometry, ModelConfig, resolve
from rolaq.common.errors import RolaqError
from rolaq.serve import planner, shape
from rolaq.serve.config import PlanConfig, ServerConfig

LITE = Geometry(layers=27, latent_dim=512, rope_dim=64, heads=16, parameters=15_706_484_224)


def config(geometry=LITE, gpu_gb=140.4, **server):
    values = {"memory_fraction": 0.8, **server}
    model = ModelConfig(name="m", path="somebody/something", geometry=geometry)
    return PlanConfig(model=model, server=ServerConfig(**values), gpu_gb=gpu_gb)


def caches(cfg):
    return {row["cache"].split()[0]: row for row in planner.plan(cfg)["caches"]}


def test_as_many_bf16_tokens_as_sglang_had_on_an_h200():
    found = caches(config())["BF16"]["tokens"]
    assert found == pytest.approx(2_822_142, rel=0.001)


def test_int2_holds_nearly_four_times_as_many():
    found = caches(config())
    assert found["INT2"]["bytes_per_token"] == 27 * 288 + 4
    assert found["BF16"]["bytes_per_token"] == 27 * 1152
    assert found["FP8"]["bytes_per_token"] == 27 * 576
    assert 3.96 <= found["INT2"]["times_bf16"] <= 4
    assert found["FP8"]["times_bf16"] == pytest.approx(2, abs=1e-3)
    assert found["INT2"]["requests"] == 256  # as many as there are slots
    assert found["BF16"]["requests"] == found["BF16"]["tokens"] // 32768


def test_no_format_takes_more_than_there_is():
    cfg = config()
    available = planner.plan(cfg)["memory_gib"]["cache"] * 2**30
    for row in caches(cfg).values():
        page = 64 * row["bytes_per_token"]
        used = (
            row["tokens"] * row["bytes_per_token"] + row["fixed_gib"] * 2**30 + page * (not row["fixed_gib"])
        )
        assert 0 <= available - used < page + 1


def test_error_feedback_takes_a_little_of_the_fixed_part():
    plain, shaped = (caches(config().model_copy(update={"feedback": f}))["INT2"] for f in (False, True))
    more = (shaped["fixed_gib"] - plain["fixed_gib"]) * 2**30
    assert more == pytest.approx(27 * (512 * 512 + 8 * 512))


def test_more_gpus_share_the_weights_but_not_the_cache():
    one, two = (planner.plan(config(tp=tp)) for tp in (1, 2))
    assert two["memory_gib"]["weights"] == pytest.approx(one["memory_gib"]["weights"] / 2)
    gained = two["caches"][0]["tokens"] - one["caches"][0]["tokens"]
    assert gained == pytest.approx(LITE.parameters / (27 * 1152), rel=0.01)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(RolaqError, match=r"take 29\.3 GiB of a GPU, 19\.2 are there"):
        planner.plan(config(gpu_gb=24))


def test_heads_that_do_not_split_over_the_gpus_are_refused():
    with pytest.raises(RolaqError, match="server.tp=3 does not divide the 16 attention heads"):
        planner.plan(config(tp=3))


@pytest.mark.parametrize(
    ("total", "tp", "reserved"),  # MiB, by SGLang 0.5.17's rule
    [
        (16, 1, 512 + 3072 + 128 + 16),
        (24, 1, 512 + 3072 + 128 + 48),
        (24, 4, 512 + 3072 + 512 + 160),
        (48, 1, 512 + 6144 + 128 + 64),
        (80, 1, 512 + 12288 + 128 + 512),
        (140, 8, 512 + 12288 + 1024 + 1024),
        (180, 1, 512 + 24576 + 128 + 1024),
    ],
)
def test_sglangs_own_memory_fraction(total, tp, reserved):
    assert planner.default_fraction(total, tp) == round(1 - reserved / 1024 / total, 3)


@pytest.mark.parametrize(
    ("name", "config_class", "values"),
    [
        ("ds-v2-lite", DeepseekV2Config, {"vocab_size": 102400, "intermediate_size": 10944, "tie_word_embeddings": False}),
        ("moonlight", DeepseekV3Config, {"vocab_size": 163840, "intermediate_size": 11264, "tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_shipped_geometries_count_what_transformers_builds(name, config_class, values):
    import torch
    from hydra import compose, initialize_config_module

    with initialize_config_module("rolaq.conf", version_base="1.3"):
        given = resolve(compose("plan", [f"model={name}"]), PlanConfig).model.geometry
    common = {
        "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64, "first_k_dense_replace": 1,
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class(**common, **values))
    assert given.parameters == sum(p.numel() for p in model.parameters())
    assert (given.layers, given.latent_dim, given.rope_dim, given.heads) == (27, 512, 64, 16)


def test_a_folder_says_its_own_shape_and_size():
    cfg = ModelConfig(name="t", path="testbed/tiny")
    found = shape.geometry_of(cfg)
    assert found == Geometry(layers=6, latent_dim=256, rope_dim=32, heads=6, parameters=12_712_320)
    assert shape.weight_bytes(cfg, found.parameters) == pytest.approx(2 * found.parameters, rel=0.01)
    absent = ModelConfig(name="a", path="/no/such/folder/at/all")
    assert shape.weight_bytes(absent, 10) == 20


def test_the_command_writes_json(tmp_path, capsys):
    from hydra import compose, initialize_config_module

    path = tmp_path / "plan.json"
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        planner.run(compose("plan", ["model=minicpm3", "gpu_gb=24", "budget=0+0", f"output={path}"]))
    written = json.loads(path.read_text())
    assert written["model"] == "minicpm3"
    assert written["caches"][2]["cache"] == "INT2 0+0"
    assert "tokens that fit" in capsys.readouterr().out
