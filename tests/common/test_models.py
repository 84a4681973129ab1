import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.models import load_model, pick_device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A very small DeepSeek-V2 with random weights."""
    path = tmp_path_factory.mktemp("model")
    config = DeepseekV2Config(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(path)
    return path


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_loads_frozen_in_eval_mode(folder, dtype, expected):
    model, tokenizer = load_model(ModelConfig(name="m", path=str(folder), dtype=dtype, device="cpu"))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == expected
    assert tokenizer.pad_token == "<end>"
    assert model(torch.tensor([[0, 1, 2]])).logits.shape == (1, 3, 4)


def test_own_class_is_preferred_to_trusted_remote_code(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_other.Other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(ModelConfig(name="m", path=str(tmp_path), trust_remote_code=True, device="cpu"))
    assert type(model) is DeepseekV2ForCausalLM


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("pkg://rolaq.conf/model", None, "holds no config.json"),
        ("./nowhere", None, "there is no model folder"),
        ("{tmp}", {"model_type": "nothing_known"}, "cannot load model"),
        ("{tmp}", {"model_type": "deepseek_v2"}, "cannot load model"),
    ],
)
def test_wrong_models_are_one_line(tmp_path, path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(RolaqError, match=message) as caught:
        load_model(ModelConfig(name="m", path=path.format(tmp=tmp_path), device="cpu"))
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(monkeypatch):
    import transformers

    def refuse(*_, **__):
        raise OSError("We couldn't connect to the hub\nto load the files")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(
        RolaqError, match="cannot load model 'owner/name': check the id, the network"
    ) as caught:
        load_model(ModelConfig(name="m", path="owner/name", device="cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["gpu!", "cuda:99"])
def test_wrong_devices_are_named(device):
    with pytest.raises(RolaqError, match=f"model.device='{device}'"):
        pick_device(device)
    assert pick_device("cpu").type == "cpu"
