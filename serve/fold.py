"""Fold the read-side rotation into a loaded SGLang model's absorbed projections (paper, "Serving")."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.quant.folding import fold

MARK = "rolaq_folded"


def attentions(model: nn.Module) -> dict[int, Any]:
    """The MLA attention modules of this process by layer: those with absorbed projections."""
    found = (m for m in model.modules() if getattr(m, "w_kc", None) is not None and hasattr(m, "w_vc"))
    return {_layer_id(module): module for module in found}


def _layer_id(module: Any) -> int:
    inner = getattr(module, "attn_mqa", None) or module.attn
    return int(inner.layer_id)


def _plain(module: Any, name: str) -> Tensor:
    """An absorbed projection in BF16, whatever the checkpoint's own quantization made of it."""
    weight = getattr(module, name)
    if getattr(module, "use_deep_gemm_bmm", False) or weight.dtype not in (torch.bfloat16, torch.float32):
        raise RolaqError(
            f"{name} of layer {_layer_id(module)} is {weight.dtype}: load the model so that kv_b_proj is BF16"
        )
    return weight


def fold_model(model: nn.Module, artifact: Artifact) -> int:
    """`w_kc [H, nope, d] → w_kc R` and `w_vc [H, d, v] → R^T w_vc` in place, in fp64, cast once; returns the layers
    folded. Folding twice does nothing. With error feedback R is P^{-T}.

    Raises:
        RolaqError: the artifact has other layers or another latent size than the model, or weights are quantized.
    """
    modules, matrices = attentions(model), artifact.method().read_matrix
    layers, d = matrices.shape[:2]
    if not modules or max(modules) >= layers:
        raise RolaqError(
            f"the artifact has {layers} layers, the model's MLA layers are {sorted(modules)}: calibrate this model"
        )
    for i, module in modules.items():
        if getattr(module, MARK, False):
            continue
        keys, values = _plain(module, "w_kc"), _plain(module, "w_vc")
        if keys.shape[-1] != d:
            raise RolaqError(
                f"layer {i} has latents of {keys.shape[-1]}, the artifact of {d}: calibrate this model"
            )
        keys.copy_(fold(keys, matrices[i]))
        values.copy_(fold(values.transpose(1, 2), matrices[i]).transpose(1, 2))
        setattr(module, MARK, True)
    return len(modules)


def expand(module: Any, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[n, H, nope + d_r]` and values `[n, H, v]` of latents `[n, d]` in the written basis, mean and all, and RoPE
    keys `[n, d_r]`, by the folded projections: reading a prefix needs no rotation either."""
    heads, nope, d = module.w_kc.shape
    latents = latents.to(module.w_kc.dtype)
    keys = latents.new_empty(len(latents), heads, nope + rope.shape[-1])
    keys[..., :nope] = torch.bmm(latents.expand(heads, -1, -1), module.w_kc.transpose(1, 2)).transpose(0, 1)
    keys[..., nope:] = rope[:, None]
    # SGLang keeps w_vc with the latent innermost, so this is one plain matrix product.
    values = functional.linear(latents, module.w_vc.transpose(1, 2).reshape(-1, d))
    return keys, values.unflatten(-1, (heads, -1))
