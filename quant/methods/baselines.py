"""The baselines without state: BF16, RTN and QuaRot (RoLaQ, App. A.2)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.methods.base import Method, Uncalibrated, register
from rolaq.quant.minmax import rtn
from rolaq.quant.spec import QuantizerSpec


class Exact(Uncalibrated):
    """The uncompressed cache."""

    name = "bf16"
    exact = True

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`latent` itself."""
        return latent


class Rtn(Uncalibrated):
    """Round-to-nearest over groups of latent coordinates within each token."""

    name = "rtn"

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`RTN(c)`; see `Method.reconstruct`."""
        return rtn(latent, self.spec.group_size, self.spec.bits).to(latent.dtype)


class Quarot(Uncalibrated):
    """RTN between two block-diagonal Hadamard rotations (Eq. 11)."""

    name = "quarot"

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`RTN(c H) H^T`; see `Method.reconstruct`."""
        group = self.spec.group_size
        rotation = _blocks(latent.shape[-1], group, latent.device)
        return (rtn(latent.float() @ rotation, group, self.spec.bits) @ rotation.T).to(latent.dtype)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # kept for later, when gradients may be wanted
def _blocks(d: int, block: int, device: torch.device) -> Tensor:
    return block_hadamard(d, block).to(device)


@register("bf16", "rtn", "quarot")
def build_baseline(name: str, *, artifact: Any, d: int, layers: int, spec: QuantizerSpec | None) -> Method:
    """One of the three; raises `RolaqError` where latents of width `d` do not split into groups."""
    if name == "bf16":
        return Exact(spec)
    method = Rtn(spec) if name == "rtn" else Quarot(spec)
    method.spec.check(d)
    return method
