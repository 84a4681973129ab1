"""Which model an artifact belongs to, told from the loaded model itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rolaq.common.errors import RolaqError
from rolaq.quant.metadata import ModelIdentity

if TYPE_CHECKING:
    from rolaq.quant.adapters.layers import MLALayer


def weights_fingerprint(layers: Sequence[MLALayer]) -> str:
    """First 16 digits of the SHA-256 of the outer layers' `kv_b_proj` weights as BF16 bytes.

    Independent of where the model was loaded from and of the dtype it runs in, as long as that dtype
    holds BF16 exactly. Two layers are enough to tell fine-tunes of one shape apart.
    """
    return outer_fingerprint(layers[0].kv_b_weight, layers[-1].kv_b_weight)


def outer_fingerprint(first: Tensor, last: Tensor) -> str:
    """`weights_fingerprint` from the two layers' `kv_b_proj` weights themselves, as a checkpoint stores them."""
    digest = hashlib.sha256()
    for weight in (first.detach(), last.detach()):
        digest.update(weight.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def parameters_fingerprint(model: nn.Module, sampled: int = 64) -> str:
    """First 16 digits of the SHA-256 over evenly spaced values of every parameter, with names and shapes.

    Cheap at any size, and different for a fine-tune that leaves `kv_b_proj` as it was. Unlike
    `weights_fingerprint` it depends on how Transformers names and fuses parameters.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        values = flat[:: max(1, flat.numel() // sampled)][:sampled]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def model_identity(
    layers: Sequence[MLALayer], config: Any, name: str, revision: str | None = None
) -> ModelIdentity:
    """Identity of a loaded model from its MLA layers and its Transformers `config`.

    Raises `RolaqError` when the layers disagree in their dimensions: one artifact holds one shape.
    """
    shapes = {(layer.latent_dim, layer.rope_dim) for layer in layers}
    if len(shapes) != 1:
        raise RolaqError(
            f"the MLA layers of {name} have different (latent, rope) dimensions: {sorted(shapes)}"
        )
    latent_dim, rope_dim = shapes.pop()
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return ModelIdentity(
        name=name,
        revision=revision,
        architecture=architectures[0],
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        layers=len(layers),
        weights=weights_fingerprint(layers),
    )
