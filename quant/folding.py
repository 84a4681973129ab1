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
    """
    return (weight.double() @ rotation.to(weight.device, torch.float64)).to(weight.dtype)


def folded_projections(layer: MLALayer, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Per head, what absorbed attention multiplies with: `W_K R [H, nope, d]` and `W_V R [H, v, d]`.

    The query becomes `q W_K R`, and the head's output is `(sum_t p_t z_hat_t) (W_V R)^T`.
    """
    by_head = fold(layer.kv_b_weight.detach(), rotation).unflatten(
        0, (layer.heads, layer.nope_dim + layer.v_dim)
    )
    keys, values = by_head.split((layer.nope_dim, layer.v_dim), dim=1)
    return keys, values
