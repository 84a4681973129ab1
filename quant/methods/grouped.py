"""Methods that rotate, then apply the group-normalised four-level quantizer: oscar, rolaq, hadamard.

They differ only in their tensors: rotation `[L, d, d]` fp32, threshold `[L]` and gain `[L]` fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.oscar import GAIN
from rolaq.quant.quantizer import Codes, encode
from rolaq.quant.response import gain as coupled_gain
from rolaq.quant.restore import restored
from rolaq.quant.spec import QuantizerSpec


class FourLevelMethod:
    """`c_hat = DQ(Q(c R)) R^T` with one R, T and g per layer (paper Eq. 5, 13)."""

    exact = False

    def __init__(
        self, name: str, rotation: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec | None = None
    ) -> None:
        self.name = name
        self.spec = spec or QuantizerSpec()
        self.rotation, self.threshold, self.gain = rotation.float(), threshold.float(), gain.float()
        self.spec.check(rotation.shape[-1], name)

    def to(self, device: torch.device | str) -> FourLevelMethod:
        """The same method with its tensors on `device`."""
        rotation, threshold, gain = (t.to(device) for t in (self.rotation, self.threshold, self.gain))
        return FourLevelMethod(self.name, rotation, threshold, gain, self.spec)

    @property
    def read_matrix(self) -> Tensor:
        """What projections are folded with, `[L, d, d]` fp32: R itself."""
        return self.rotation

    def by_token(self, tokens: int) -> bool:
        """Tokens are quantized one by one whatever their positions: adapters may batch rows of any lengths."""
        return True

    def quantize(self, latent: Tensor, layer: int) -> Codes:
        """Codes and statistics of `latent [..., d]` as they are stored."""
        return encode(
            latent.float() @ self.rotation[layer], self.threshold[layer], self.gain[layer], self.spec
        )

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """Quantized `latent [B, n, d]` in the original basis, same dtype; tokens are independent."""
        rotation = self.rotation[layer]
        z = restored(latent.float() @ rotation, self.threshold[layer], self.gain[layer], self.spec)
        return (z @ rotation.mT).to(latent.dtype)

    def with_gain(self, gain: float, name: str | None = None) -> FourLevelMethod:
        """The same rotation and thresholds with one gain in every layer (Figure 2b's intervention)."""
        return FourLevelMethod(
            name or self.name, self.rotation, self.threshold, torch.full_like(self.gain, gain), self.spec
        )


def oscar_method(rotation: Tensor, spec: QuantizerSpec | None = None, gain: float = GAIN) -> FourLevelMethod:
    """OSCAR: covariance rotation `[L, d, d]`, T0, g0 = 1.16 (kappa 1.041)."""
    spec = spec or QuantizerSpec()
    layers = rotation.shape[0]
    threshold = torch.full((layers,), spec.threshold_init, device=rotation.device)
    return FourLevelMethod("oscar", rotation, threshold, torch.full_like(threshold, gain), spec)


def hadamard_method(layers: int, latent_dim: int, spec: QuantizerSpec | None = None) -> FourLevelMethod:
    """Uncalibrated reference: block Hadamard, T0 and unit response (kappa 1)."""
    spec = spec or QuantizerSpec()
    rotation = block_hadamard(latent_dim, spec.group_size).expand(layers, -1, -1)
    threshold = torch.full((layers,), spec.threshold_init)
    return FourLevelMethod("hadamard", rotation, threshold, coupled_gain(threshold, spec), spec)
