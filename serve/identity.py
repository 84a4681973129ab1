"""What a server would load, told from the model's config and weight files before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError, one_line
from rolaq.common.files import read_json
from rolaq.common.models import source_of
from rolaq.quant.artifact import Artifact
from rolaq.quant.identity import outer_fingerprint
from rolaq.quant.metadata import ModelIdentity
from rolaq.quant.verify import verify_model
from rolaq.serve.refusals import refuse_artifact

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM")
LATENTS, ROPES = (256, 512), (32, 64)  # what the kernels are made for
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def read_config(cfg: ModelConfig) -> dict[str, Any]:
    """The model's `config.json`, from its folder or the hub.

    Raises:
        RolaqError: no such model, or no access to it.
    """
    source = source_of(cfg)
    if Path(source).is_dir():
        return read_json(Path(source) / "config.json")
    from huggingface_hub import hf_hub_download

    try:
        return read_json(hf_hub_download(source, "config.json", revision=cfg.revision))
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        raise RolaqError(
            f"cannot read the config of {source!r}: check the id, the network, or log in with "
            f"`hf auth login` ({one_line(error, 200)})"
        ) from error


def identify(config: Mapping[str, Any], cfg: ModelConfig) -> ModelIdentity:
    """The model's identity from its config, without the weights' fingerprint.

    Raises:
        RolaqError: an architecture or a latent that cannot be served.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise RolaqError(
            f"{cfg.name} is a {architecture}, which cannot be served on the packed cache; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    latent, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if latent not in LATENTS or rope not in ROPES:
        raise RolaqError(
            f"{cfg.name} has latents of {latent} and RoPE keys of {rope}; the kernels are for latents of "
            f"{' or '.join(map(str, LATENTS))} and RoPE keys of {' or '.join(map(str, ROPES))}"
        )
    return ModelIdentity(
        name=cfg.name,
        revision=cfg.revision,
        architecture=architecture,
        latent_dim=latent,
        rope_dim=rope,
        layers=config["num_hidden_layers"],
        weights="",
    )


def verify(artifact: Artifact, identity: ModelIdentity, weights: str | None, where: str) -> None:
    """Raise `RolaqError` naming the field in which the artifact's model differs.

    `weights` is the model's fingerprint, or None where it could not be told.
    """
    refuse_artifact(artifact)
    expected = artifact.config.model
    verify_model(
        expected,
        identity.model_copy(update={"weights": expected.weights if weights is None else weights}),
        where,
    )


def stored_fingerprint(cfg: ModelConfig, layers: int) -> str | None:
    """`quant.identity.weights_fingerprint` of the model from two tensors of its safetensors files.

    None where they are not on this machine yet, or are quantized themselves.
    """
    from safetensors import safe_open

    tensors = []
    for layer in (0, layers - 1):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        path = _file_of(cfg, name)
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            if name not in file.keys():  # noqa: SIM118 (not a mapping)
                return None
            tensors.append(file.get_tensor(name))
    return outer_fingerprint(*tensors) if all(t.dtype in PLAIN for t in tensors) else None


def _file_of(cfg: ModelConfig, tensor: str) -> Path | None:
    """The local safetensors file that holds a tensor."""
    index = local_file(cfg, "model.safetensors.index.json")
    name = read_json(index)["weight_map"].get(tensor) if index else "model.safetensors"
    return local_file(cfg, name) if name else None


def local_file(cfg: ModelConfig, name: str) -> Path | None:
    """A file of the model on this machine: in its folder or the hub's cache; None where it is not."""
    source = source_of(cfg)
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, name, revision=cfg.revision)
    return Path(found) if isinstance(found, str) else None
