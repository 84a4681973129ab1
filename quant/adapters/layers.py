"""Finding a model's MLA layers and the module that drives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rolaq.common.errors import RolaqError

NORM, EXPAND = "kv_a_layernorm", "kv_b_proj"


@dataclass(frozen=True)
class MLALayer:
    """One MLA attention.

    The latent `[B, n, latent_dim]` passes from `module.kv_a_layernorm` through the cache to `module.kv_b_proj`,
    whose output is interleaved by head as `[nope_dim | v_dim]`.
    """

    name: str
    """The attention's path in the model."""
    module: nn.Module = field(repr=False)
    index: int
    """Position among the MLA layers, from 0."""
    latent_dim: int
    rope_dim: int
    heads: int
    nope_dim: int
    v_dim: int

    @property
    def kv_b_weight(self) -> Tensor:
        """`kv_b_proj.weight`, `[H * (nope + v), d]`, interleaved by head as `[nope | v]`."""
        weight: Any = getattr(self.module, EXPAND).weight
        return weight

    @property
    def cache_index(self) -> int:
        """The layer's place in the model's cache."""
        index: Any = self.module.layer_idx
        return int(index)


def find_mla_layers(model: nn.Module) -> list[MLALayer]:
    """The MLA layers of a model that cache a latent of their own, in the stack's order.

    Raises:
        RolaqError: the model has none (names its architecture), or one lacks what adapters hook (names it).
    """
    found = [
        (name, module) for name, module in model.named_modules() if getattr(module, NORM, None) is not None
    ]
    if not found:
        raise RolaqError(
            f"{architecture(model)} has no Multi-head Latent Attention (no {NORM}): nothing to quantize"
        )
    return [_layer(name, module, index) for index, (name, module) in enumerate(found)]


def find_readers(model: nn.Module) -> list[nn.Module]:
    """Attentions that expand another layer's latents instead of caching their own (Mistral Large 4)."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, EXPAND, None), nn.Module) and getattr(module, NORM, None) is None
    ]


def find_decoder(model: nn.Module) -> nn.Module:
    """The innermost model that holds all MLA layers: it creates the cache and the attention mask."""
    paths = zip(*(layer.name.split(".") for layer in find_mla_layers(model)), strict=False)
    shared: list[str] = []
    for parts in paths:
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    holders = (model.get_submodule(".".join(shared[:depth])) for depth in range(len(shared), -1, -1))
    return next((holder for holder in holders if isinstance(holder, PreTrainedModel)), model)


def architecture(model: nn.Module) -> str:
    """The model's architecture for messages: its config's, or its class."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    return names[0] if names else type(model).__name__


def _layer(name: str, module: nn.Module, index: int) -> MLALayer:
    for needed in (EXPAND, "layer_idx"):
        if getattr(module, needed, None) is None:
            raise RolaqError(
                f"{name} ({type(module).__name__}) has {NORM} but no {needed}: it cannot be attached to"
            )
    return MLALayer(
        name=name,
        module=module,
        index=index,
        latent_dim=_dimension(name, module, "kv_lora_rank"),
        rope_dim=_dimension(name, module, "qk_rope_head_dim"),
        heads=_dimension(name, module, "num_heads", "num_attention_heads"),
        nope_dim=_dimension(name, module, "qk_nope_head_dim"),
        v_dim=_dimension(name, module, "v_head_dim"),
    )


def _dimension(name: str, module: nn.Module, *keys: str) -> int:
    """A size from the attention's own attributes, or else from its config."""
    sources = (module, getattr(module, "config", None))
    values = (getattr(source, key, None) for source in sources for key in keys)
    value = next((value for value in values if isinstance(value, int)), None)
    if value is None:
        raise RolaqError(f"{name} ({type(module).__name__}) does not say its {keys[0]}")
    return value
