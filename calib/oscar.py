"""OSCAR's fit: one rotation per layer from the covariance of its cached latents (App. A.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.oscar import oscar_rotation


class LatentCovariance:
    """A quantization method that changes nothing and sums `c^T c` of every latent it is shown, in fp64."""

    name = "covariance"
    exact = False

    def __init__(self, layers: Sequence[MLALayer]) -> None:
        self.sums = [_zeros(layer) for layer in layers]
        self.tokens = [0 for _ in layers]

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """Count `latent [B, n, d]` towards the layer's covariance and return it unchanged."""
        rows = latent.detach().flatten(0, -2).double()
        self.sums[layer] += rows.T @ rows
        self.tokens[layer] += rows.shape[0]
        return latent

    def covariance(self, layer: int) -> Tensor:
        """Uncentred `Sigma = c^T c / N`, `[d, d]` fp64."""
        return self.sums[layer] / self.tokens[layer]


def _zeros(layer: MLALayer) -> Tensor:
    device = next(layer.module.parameters()).device
    return torch.zeros(layer.latent_dim, layer.latent_dim, dtype=torch.float64, device=device)


@torch.no_grad()
def latent_covariance(
    model: PreTrainedModel, layers: Sequence[MLALayer], ids: Tensor, batch_tokens: int = 4096
) -> LatentCovariance:
    """Statistics of the latents that `model` caches for `ids [n, length]`, in one pass."""
    statistics = LatentCovariance(layers)
    device = model.get_input_embeddings().weight.device
    with attach(model, statistics):
        for batch in ids.split(max(1, batch_tokens // ids.shape[1])):
            model(input_ids=batch.to(device), use_cache=False, logits_to_keep=1)
    return statistics


def fit_oscar(model: PreTrainedModel, layers: Sequence[MLALayer], ids: Tensor, block: int = 128) -> Tensor:
    """R0 of every layer, `[L, d, d]` fp32 on the CPU, from the latents of `ids [n, length]`."""
    statistics = latent_covariance(model, layers, ids)
    return torch.stack([oscar_rotation(statistics.covariance(i).cpu(), block) for i in range(len(layers))])
