"""Which model would be served, and whether the artifact is for it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.serve import identity

TINY = {"name": "tiny", "path": "pkg://rolaq.testbed/tiny"}


@pytest.fixture(scope="module")
def artifact():
    return Artifact.load("testbed/artifact/rolaq")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree("testbed/tiny", tmp_path / "model")
    return tmp_path / "model"


def of(path):
    return ModelConfig(name="mine", path=str(path))


def changed(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return of(folder)


def check(cfg, artifact):
    model = identity.identify(identity.read_config(cfg), cfg)
    identity.verify(artifact, model, identity.stored_fingerprint(cfg, model.layers), "here")


def test_the_artifact_that_ships_fits_the_model_that_ships(artifact):
    cfg = ModelConfig(**TINY)
    assert identity.stored_fingerprint(cfg, 6) == artifact.config.model.weights
    check(cfg, artifact)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_hidden_layers": 5}, "layers is 6 (tiny), the loaded model's is 5 (mine)"),
        ({"kv_lora_rank": 512}, "latent_dim is 256 (tiny), the loaded model's is 512 (mine)"),
        ({"qk_rope_head_dim": 64}, "rope_dim is 32"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture is DeepseekV2ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "mine is a LlamaForCausalLM, which cannot be served"),
        ({"architectures": None}, "mine is a none"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "supported: DeepseekV2ForCausalLM"),
        ({"kv_lora_rank": 384}, "mine has latents of 384 and RoPE keys of 32; the kernels are for"),
        ({"kv_lora_rank": None}, "mine has latents of None"),
    ],
)
def test_another_model_is_named_by_what_differs(folder, artifact, values, says):
    with pytest.raises(RolaqError) as error:
        check(changed(folder, **values), artifact)
    assert says in str(error.value)


def test_other_weights_of_the_same_shape_are_noticed(folder, artifact):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.5.self_attn.kv_b_proj.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RolaqError, match="weights is 8d601719450fe2ba"):
        check(of(folder), artifact)


def test_sharded_weights_are_found(folder, artifact):
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, folder / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert identity.stored_fingerprint(of(folder), 6) == artifact.config.model.weights


@pytest.mark.parametrize("case", ["none", "quantized"])
def test_weights_that_cannot_be_compared(folder, artifact, case):
    if case == "none":
        (folder / "model.safetensors").unlink()
    else:
        weights = load_file(folder / "model.safetensors")
        weights = {k: v.to(torch.float8_e4m3fn) if "kv_b_proj" in k else v for k, v in weights.items()}
        save_file(weights, folder / "model.safetensors")
    assert identity.stored_fingerprint(of(folder), 6) is None
    check(of(folder), artifact)


def test_where_artifacts_are_looked_for(make_config, tmp_path):
    assert make_config().artifact_folder().name == "rolaq"
    assert make_config(artifact="testbed/artifact").artifact_folder().parts[-2:] == ("artifact", "rolaq")
    assert make_config(artifact="testbed/artifact/oscar").artifact_folder().name == "oscar"
    with pytest.raises(
        RolaqError, match=r"no artifact for tiny in .*nowhere/tiny/rolaq: run `make calibrate MODEL=tiny`"
    ):
        make_config(model={"artifact": None}).artifact_folder()
    with pytest.raises(RolaqError, match="no artifact for tiny in"):
        make_config(artifact=str(tmp_path)).artifact_folder()


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(RolaqError, match="there is no model folder"):
        identity.read_config(of(tmp_path / "a/b/c"))
