"""Read-side rotation folded into the projections, so that reading needs no rotation (paper Eq. 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rolaq.quant.adapters.layers import MLALayer


def fold(weight: Tensor, rotation: Tensor) -> Tensor:
    """`W R` for any projection `weight [..., d]` of the latent and R `[d, d]`, in the weight's dtype.

    `c_hat W^T = z_hat (W R)^T` with `c_hat = z_hat R^T`. The product is taken in fp64 and cast once.
    Where the write matrix P is not orthogonal (`methods.shaped`), R here is the inverse's transpose.
    """
    return (weight.double() @ rotation.to(weight.device, torch.float64)).to(weight.dtype)


def value_bias(layer: MLALayer, mean: Tensor) -> Tensor:
    """What a mean latent `[d]` adds to each head's output, `W_V mean` `[H, v]` fp32, in fp64 and rounded once.

    Latents stored without their mean read the same with it: attention weights sum to one, so the value
    part is this constant, and the key part is one constant for each query, which softmax drops.
    """
    by_head = layer.kv_b_weight.detach().double().unflatten(0, (layer.heads, layer.nope_dim + layer.v_dim))
    return (by_head[:, layer.nope_dim :] @ mean.to(by_head)).float()


def folded_projections(layer: MLALayer, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Per head, what absorbed attention multiplies with: `W_K R [H, nope, d]` and `W_V R [H, v, d]`.

    The query becomes `q W_K R`, and the head's output is `(sum_t p_t z_hat_t) (W_V R)^T`.
    """
    by_head = fold(layer.kv_b_weight.detach(), rotation).unflatten(
        0, (layer.heads, layer.nope_dim + layer.v_dim)
    )
    keys, values = by_head.split((layer.nope_dim, layer.v_dim), dim=1)
    return keys, values
