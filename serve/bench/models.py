"""Model folders to serve: a configuration for dummy weights, and checkpoints of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rolaq.common.files import read_json, write_json
from rolaq.quant.artifact import Artifact
from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.identity import weights_fingerprint
from rolaq.quant.metadata import ModelIdentity
from rolaq.quant.response import gain
from rolaq.quant.spec import QuantizerSpec

Json = dict[str, Any]
DUMMY = "dummy"


def write_config(config: Json, folder: Path) -> Path:
    """A folder that holds nothing but ``config.json``, for SGLang's dummy weights."""
    write_json(folder / "config.json", config)
    return folder


def write_artifact(config: Json, weights: str, folder: Path) -> Path:
    """An uncalibrated artifact of the right shape: block Hadamard rotations, T0 and its gain.

    ``weights`` is the fingerprint of the weights it belongs to, `DUMMY` where they are made up.
    """
    spec, layers, d = QuantizerSpec(), config["num_hidden_layers"], config["kv_lora_rank"]
    model = ModelIdentity(
        name=folder.parent.name,
        architecture=config["architectures"][0],
        latent_dim=d,
        rope_dim=config["qk_rope_head_dim"],
        layers=layers,
        weights=weights,
    )
    threshold = torch.full((layers,), spec.threshold_init)
    tensors = {
        "rotation": block_hadamard(d, spec.group_size).expand(layers, -1, -1),
        "threshold": threshold,
        "gain": gain(threshold.double(), spec).float(),
    }
    return Artifact.create("rolaq", model, spec, tensors).save(folder)


def dummy(config: str, folder: Path) -> tuple[Path, Path]:
    """Model folder and artifact for dummy weights of the configuration file `config`."""
    content = read_json(config)
    return write_config(content, folder / "model"), write_artifact(content, DUMMY, folder / "artifact")


def shapes(config: Json) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a DeepSeek-V2 checkpoint without query compression."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
        yield from ((f"{prefix}self_attn.{name}", shape) for name, shape in _attention(config))
        yield from ((f"{prefix}mlp.{name}", shape) for name, shape in _mlp(config, layer))


def _attention(config: Json) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, d = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "q_proj.weight", (heads * (nope + rope), hidden)
    yield "kv_a_proj_with_mqa.weight", (d + rope, hidden)
    yield "kv_a_layernorm.weight", (d,)
    yield "kv_b_proj.weight", (heads * (nope + v), d)
    yield "o_proj.weight", (hidden, heads * v)


def _mlp(config: Json, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if layer < config["first_k_dense_replace"]:
        yield from _gated("", config["hidden_size"], config["intermediate_size"])
        return
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield "gate.weight", (config["n_routed_experts"], hidden)
    for expert in range(config["n_routed_experts"]):
        yield from _gated(f"experts.{expert}.", hidden, width)
    yield from _gated("shared_experts.", hidden, width * config["n_shared_experts"])


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms are one, matrices keep the scale of what they multiply, logits spread over some 16 nats.

    With logits so wide the best token is rarely a tie, so that greedy outputs can be compared.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 1.0 if "embed" in name else shape[1] ** -0.5 * (16.0 if "lm_head" in name else 1.0)
    device = generator.device
    return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16().cpu()


def random_checkpoint(config: Json, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Model folder with random BF16 weights on disk, and an artifact that belongs to them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes(config)}
    model = write_config(config, folder / "model")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    outer = (0, config["num_hidden_layers"] - 1)
    layers: Any = [
        SimpleNamespace(kv_b_weight=tensors[f"model.layers.{n}.self_attn.kv_b_proj.weight"]) for n in outer
    ]
    return model, write_artifact(config, weights_fingerprint(layers), folder / "artifact")


def reduced(config: str, layers: int, experts: int) -> Json:
    """The configuration file with fewer layers and experts: the shape of its attention, in a few gigabytes."""
    return {**read_json(config), "num_hidden_layers": layers, "n_routed_experts": experts}
