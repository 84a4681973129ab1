"""The learnable quantizer: one rotation, threshold and gain per layer (paper §3.1–3.2)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rolaq.quant.oscar import GAIN
from rolaq.quant.quantizer import fake_quantize
from rolaq.quant.response import gain as coupled_gain
from rolaq.quant.rotation import Rotation
from rolaq.quant.spec import QuantizerSpec

class Parameters(NamedTuple):
    """What an artifact stores: rotation `[L, d, d]`, threshold `[L]`, gain `[L]`, fp32, detached."""

    rotation: Tensor
    threshold: Tensor
    gain: Tensor


class StudentMethod:
    """Differentiable quantization with the rotations of one optimisation step, shared by all layers."""

    name = "rolaq"
    exact = False

    def __init__(self, rotation: Tensor, threshold: Tensor, gain: Tensor, options: dict) -> None:
        self.rotation, self.threshold, self.gain, self.options = rotation, threshold, gain, options

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`DQ(Q(c R)) R^T` of `latent [B, n, d]`, fp32 inside; every token on its own, so padding is harmless."""
        rotation = self.rotation[layer]
        rotated = latent.to(rotation.dtype) @ rotation
        rebuilt = fake_quantize(rotated, self.threshold[layer], self.gain[layer], **self.options)
        return (rebuilt @ rotation.mT).to(latent.dtype)


class Student(nn.Module):
    """Holds the trainable generators and thresholds of all layers, fp32.

    gain_rule `coupled`: g = 1/C(T) (Eq. 7); `free`: a parameter per layer from OSCAR's 1.16; `fixed`: 1.16.
    """

    def __init__(
        self,
        rotation: Rotation,
        layers: int,
        spec: QuantizerSpec,
        threshold: Literal["learned", "fixed"] = "learned",
        surrogate_width: float = 0.1,
        detach_stats: bool = True,
    ) -> None:
        super().__init__()
        self.rotation, self.spec = rotation, spec
        learned = threshold == "learned"
        self.threshold = nn.Parameter(torch.full((layers,), spec.threshold_init), requires_grad=learned)
        free = spec.gain_rule == "free"
        self.free_gain = nn.Parameter(torch.full((layers,), GAIN), requires_grad=free)
        self.options = {"spec": spec, "width": surrogate_width, "detach_stats": detach_stats}

    def gain(self) -> Tensor:
        """Gain of each layer, `[L]`, differentiable in the thresholds when coupled."""
        return coupled_gain(self.threshold, self.spec) if self.spec.gain_rule == "coupled" else self.free_gain

    def method(self) -> StudentMethod:
        """A method with this step's rotations; gradients of all layers meet in one `[L, d, d]` tensor."""
        return StudentMethod(self.rotation(), self.threshold, self.gain(), self.options)

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
        return Parameters(self.rotation.export(), self.threshold.detach().clone(), self.gain().detach().clone())
