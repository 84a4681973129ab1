"""The learnable quantizer with error feedback in the loop, and the choice of its basis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolaq.calib.config import FeedbackConfig, QuantConfig
from rolaq.calib.sensitivity import Statistics
from rolaq.calib.student import Student
from rolaq.common.errors import lookup
from rolaq.quant.feedback import Feedback, fake_quantize_with_feedback, quantize_feedback
from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.metadata import FEEDBACK_METHOD
from rolaq.quant.rotation import Rotation, build_rotation
from rolaq.quant.shaping import equalising_rotation, feedback_matrix, regularise, whitening
from rolaq.quant.spec import QuantizerSpec


class ShapedParameters(NamedTuple):
    """The tensors of a `ShapedMethod`; rotation is the write matrix P."""

    rotation: Tensor
    inverse: Tensor
    mean: Tensor
    feedback: Tensor
    feedback_unit: Tensor
    threshold: Tensor
    gain: Tensor


class ShapedStudentMethod:
    """Differentiable error-feedback quantization with the tensors of one optimisation step."""

    name = FEEDBACK_METHOD
    exact = False

    def __init__(self, parameters: ShapedParameters, spec: QuantizerSpec, width: float = 0.1) -> None:
        self.parameters, self.spec, self.width = parameters, spec, width

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`DQ(Q((c - mean) P)) P^{-1} + mean` of `latent [B, n, d]`, fp32 inside; every token on its own."""
        write, read, mean, weight, unit, threshold, gain = (
            tensor[layer].to(latent.device) for tensor in self.parameters
        )
        z = (latent.float() - mean) @ write
        restored = fake_quantize_with_feedback(
            z, threshold, gain, Feedback(weight, unit), self.spec, self.width
        )
        return (restored @ read + mean).to(latent.dtype)


class Basis(NamedTuple):
    """Where a shaped student starts, all `[L, d, d]` fp64 but the mean `[L, d]`.

    white and colour: `Sigma^{-power/2}` and its inverse; sensitivity: regularised, to errors of whitened
    latents; start: an orthogonal R, so that the write matrix is `white R`.
    """

    white: Tensor
    colour: Tensor
    sensitivity: Tensor
    start: Tensor
    mean: Tensor


STARTS: dict[str, Callable[[Tensor, Tensor, QuantizerSpec], Tensor]] = {
    "equalising": lambda m, base, spec: torch.stack(
        [equalising_rotation(each.cpu(), spec.feedback_block) for each in m]
    ),
    "hadamard": lambda m, base, spec: block_hadamard(m.shape[-1], spec.group_size, torch.float64).expand_as(
        m
    ),
    "oscar": lambda m, base, spec: base,
}


def make_basis(
    found: Statistics, base: Tensor, config: FeedbackConfig, spec: QuantizerSpec, eps: float, power: float
) -> Basis:
    """The start of a student from `found`, OSCAR's `base [L, d, d]`, the regulariser and the whitening power."""
    white, colour = whitening(found.covariance, power)
    sensitivity = regularise(colour @ found.sensitivity @ colour, eps)
    start = lookup("quant.feedback.start", config.start, STARTS)(sensitivity, base, spec)
    mean = found.mean if config.centre else torch.zeros_like(found.mean)
    return Basis(white, colour, sensitivity, start.to(mean), mean)


class ShapedStudent(Student):
    """Rotation and thresholds as in `Student`; the feedback matrix follows the rotation at every step.

    The write matrix is `white R`. The feedback matrix takes no gradient: it is the best one for R, where
    its own slope is zero.
    """

    white: Tensor
    colour: Tensor
    sensitivity: Tensor
    mean: Tensor

    def __init__(self, rotation: Rotation, basis: Basis, config: QuantConfig) -> None:
        super().__init__(rotation, len(basis.mean), config)
        for name in ("white", "colour", "sensitivity", "mean"):
            self.register_buffer(name, getattr(basis, name))

    def method(self) -> ShapedStudentMethod:  # type: ignore[override]
        """A method with this step's rotations and the feedback that fits them."""
        return ShapedStudentMethod(self._dense(self.rotation()), self.spec, self.config.surrogate_width)

    @torch.no_grad()
    def export(self) -> ShapedParameters:  # type: ignore[override]
        """Dense tensors for the artifact, products in fp64."""
        return ShapedParameters(*(t.detach().clone() for t in self._dense(self.rotation.export().double())))

    def _dense(self, rotation: Tensor) -> ShapedParameters:
        kind = rotation.dtype
        with torch.no_grad():
            frozen = rotation.detach().double()
            feedback = quantize_feedback(
                feedback_matrix(frozen.mT @ self.sensitivity @ frozen, self.spec.feedback_block)
            )
        write, read = self.white.to(kind) @ rotation, rotation.mT @ self.colour.to(kind)
        tensors = (write.float(), read.float(), self.mean.float(), *feedback, self.threshold, self.gain())
        return ShapedParameters(*tensors)


def candidates(config: FeedbackConfig) -> Iterator[tuple[float, float]]:
    """Pairs of eps and whitening power to choose from."""
    return product(config.eps, config.whitening)


def choose(
    make: Callable[[float, float], ShapedStudent],
    config: FeedbackConfig,
    kl: Callable[[Any], float],
) -> tuple[ShapedStudent, list[dict[str, float]]]:
    """The student with the lowest `kl(method)` on validation text before training, and all that were tried."""
    tried, best = [], None
    for eps, power in candidates(config):
        student = make(eps, power)
        with torch.no_grad():
            found = kl(student.method())
        tried.append({"eps": eps, "whitening": power, "kl": found})
        if best is None or found < best[0]:
            best = found, student
    assert best is not None  # the configuration has at least one of each
    return best[1], tried


def build_shaped(config: QuantConfig, basis: Basis, energies: Tensor) -> ShapedStudent:
    """A student at its start; `energies [L, 2, d, d]` (H_K, H_V) are taken to the whitened basis."""
    colour = basis.colour[:, None]
    whitened = colour @ energies.to(colour) @ colour
    rotation = build_rotation(config.rotation, basis.start, whitened)
    return ShapedStudent(rotation, basis, config).to(basis.mean.device)
