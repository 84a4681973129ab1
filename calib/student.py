"""The learnable quantizer: one rotation, threshold and gain per layer (paper §3.1–3.2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rolaq.calib.config import QuantConfig
from rolaq.quant.oscar import GAIN
from rolaq.quant.quantizer import fake_quantize
from rolaq.quant.response import gain as coupled_gain
from rolaq.quant.rotation import Rotation
from rolaq.quant.spec import QuantizerSpec


class Parameters(NamedTuple):
    """What defines the quantizer, and what an artifact stores: rotation `[L, d, d]`, threshold, gain `[L]`, fp32."""

    rotation: Tensor
    threshold: Tensor
    gain: Tensor


class StudentMethod:
    """Differentiable quantization with the rotations of one optimisation step, shared by all layers.

    width: of the threshold's smooth surrogate; detach_stats: no gradient through a group's mean and
    deviation (see `quant.quantizer.fake_quantize`).
    """

    name = "rolaq"
    exact = False

    def __init__(
        self, parameters: Parameters, spec: QuantizerSpec, width: float = 0.1, detach_stats: bool = True
    ) -> None:
        self.parameters, self.spec, self.width = parameters, spec, width
        self.detach_stats = detach_stats

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`DQ(Q(c R)) R^T` of `latent [B, n, d]`, fp32 inside; every token on its own, so padding is harmless."""
        # .to() does nothing unless the model is spread over several devices
        rotation, threshold, gain = (tensor[layer].to(latent.device) for tensor in self.parameters)
        rotated = latent.to(rotation.dtype) @ rotation
        rebuilt = fake_quantize(rotated, threshold, gain, self.spec, self.width, self.detach_stats)
        return (rebuilt.to(rotation.dtype) @ rotation.mT).to(latent.dtype)


class Student(nn.Module):
    """Holds the trainable generators and thresholds of all layers, fp32.

    gain_rule `coupled`: g = 1/C(T) (Eq. 7); `free`: a parameter per layer from OSCAR's 1.16; `fixed`: 1.16.
    """

    def __init__(self, rotation: Rotation, layers: int, config: QuantConfig) -> None:
        super().__init__()
        self.rotation, self.spec, self.config = rotation, config.spec, config
        learned, free = config.threshold == "learned", config.spec.gain_rule == "free"
        self.threshold = nn.Parameter(torch.full((layers,), self.spec.threshold_init), requires_grad=learned)
        self.free_gain = nn.Parameter(torch.full((layers,), GAIN), requires_grad=free)

    def gain(self) -> Tensor:
        """Gain of each layer, `[L]`, differentiable in the thresholds when coupled."""
        return coupled_gain(self.threshold, self.spec) if self.spec.gain_rule == "coupled" else self.free_gain

    def method(self) -> StudentMethod:
        """A method with this step's rotations; gradients of all layers meet in one `[L, d, d]` tensor."""
        parameters = Parameters(self.rotation(), self.threshold, self.gain())
        return StudentMethod(parameters, self.spec, self.config.surrogate_width, self.config.detach_stats)

    def rotation_parameters(self) -> list[nn.Parameter]:
        """Trainable generators A of all layers (none for a fixed rotation)."""
        return [p for p in self.rotation.parameters() if p.requires_grad]

    def range_parameters(self) -> list[nn.Parameter]:
        """Trainable thresholds and free gains."""
        return [p for p in (self.threshold, self.free_gain) if p.requires_grad]

    @torch.no_grad()
    def project(self) -> None:
        """Put the thresholds back into the spec's bounds; called after each optimiser step."""
        self.threshold.clamp_(self.spec.threshold_min, self.spec.threshold_max)

    @torch.no_grad()
    def export(self) -> Parameters:
        """Dense rotations, thresholds and gains for the artifact."""
        return Parameters(
            self.rotation.export(), self.threshold.detach().clone(), self.gain().detach().clone()
        )
