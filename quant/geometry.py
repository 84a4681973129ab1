"""What a layer's K and V projections read from the latent (paper §2.2, App. B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rolaq.quant.adapters.layers import MLALayer


def projections(layer: MLALayer) -> tuple[Tensor, Tensor]:
    """Stacked up-projections `W_K [H * nope, d]` and `W_V [H * v, d]` in fp64.

    `kv_b_proj.weight` is `[H * (nope + v), d]`, interleaved by head as `[nope | v]`.
    """
    weight = layer.kv_b_weight.detach().double()
    by_head = weight.unflatten(0, (layer.heads, layer.nope_dim + layer.v_dim))
    keys, values = by_head.split((layer.nope_dim, layer.v_dim), dim=1)
    return keys.flatten(0, 1), values.flatten(0, 1)


def energy(w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
    """Trace-normalised `H_K, H_V [d, d]` fp64, `H_X = W_X^T W_X / tr(W_X^T W_X)` (Eq. 3)."""
    grams = [w.double().T @ w.double() for w in (w_k, w_v)]
    h_k, h_v = (gram / gram.trace() for gram in grams)
    return h_k, h_v


def energies(layers: Sequence[MLALayer]) -> Tensor:
    """`[L, 2, d, d]` fp64: H_K and H_V of every layer."""
    return torch.stack([torch.stack(energy(*projections(layer))) for layer in layers])


def cumulative_energy(h_k: Tensor, h_v: Tensor) -> tuple[Tensor, Tensor]:
    """F_K, F_V `[d]` fp64: share of each projection's energy in the leading r joint directions (Eq. 15).

    Directions are eigenvectors of `H_K + H_V` by descending eigenvalue; entry r - 1 belongs to r.
    """
    vectors = torch.linalg.eigh(h_k + h_v)[1].flip(-1)
    shares = [torch.einsum("ir,ij,jr->r", vectors, h, vectors).cumsum(0) for h in (h_k, h_v)]
    return shares[0], shares[1]
