"""The write side of each layer: what an artifact makes of new latents, and how its basis is left again.

"Written" is the basis that rows are stored in: `c R`, or with error feedback `(c - mean) P`. The folded projections
read that basis; where rows are stored without their mean, it is added back here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.reference import write_feedback_reference, write_reference
from rolaq.kernels.write import split_rotation, write
from rolaq.kernels.write_feedback import prepare, write_with_feedback
from rolaq.quant.feedback import Feedback
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.methods.shaped import ShapedMethod

Device = torch.device | str


class Layer(ABC):
    """One layer's tensors on the device, in the form its write takes: kernels on a GPU, references on a CPU."""

    nbytes: int
    """Bytes of the tensors."""

    def store(
        self, latents: Tensor, rope: Tensor, slots: Tensor, rows: Tensor, exact: Tensor, exact_row: Tensor
    ) -> None:
        """Quantize and store latents `[n, d]` with RoPE keys `[n, d_r]` in `rows[slots]`; where `exact_row [n]`
        is not negative, also the written latent in `exact[exact_row]`, BF16."""
        if latents.is_cuda:
            some = len(exact) > 0
            self._write(latents, rope, slots, rows, exact if some else None, exact_row if some else None)
            return
        packed, written = self._reference(latents, rope.bfloat16())
        rows[slots.long()] = packed
        kept = exact_row >= 0
        exact[exact_row[kept].long()] = written[kept]

    @abstractmethod
    def rotate(self, latents: Tensor) -> Tensor:
        """What the folded projections expand to the keys and values of `latents [n, d]`: `c R` or `c P`, mean and
        all, in fp32 and rounded to the latents' dtype."""

    @abstractmethod
    def add_mean(self, written: Tensor) -> Tensor:
        """Written latents, or a weighted mean of them, `[..., d]`, with the mean that they are stored without; in
        place."""

    @abstractmethod
    def restore(self, written: Tensor) -> Tensor:
        """Written latents `[n, d]` in the original basis, fp32."""

    @abstractmethod
    def _write(self, latents: Tensor, rope: Tensor, *places: Any) -> None:
        """The kernel's `store`; places are slots, rows, exact rows and their index, the last two or None."""

    @abstractmethod
    def _reference(self, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]: ...


class RotatedLayer(Layer):
    """R `[d, d]`, T and g: rows hold `Q(c R)`."""

    def __init__(self, method: FourLevelMethod, layer: int, device: Device) -> None:
        self.matrix = method.rotation[layer]
        rotation = self.matrix.to(device, torch.float32)
        self.rotation = split_rotation(rotation) if rotation.is_cuda else rotation
        self.threshold, self.gain = method.threshold[layer].item(), method.gain[layer].item()
        self.spec, self.nbytes = method.spec, self.rotation.nbytes

    def rotate(self, latents: Tensor) -> Tensor:
        rotation = self.rotation.float().sum(0) if self.rotation.ndim == 3 else self.rotation
        return (latents.float() @ rotation).to(latents.dtype)

    def add_mean(self, written: Tensor) -> Tensor:
        return written

    def restore(self, written: Tensor) -> Tensor:
        return written.float() @ self.matrix.to(written.device).T

    def _write(self, latents: Tensor, rope: Tensor, *places: Any) -> None:
        slots, rows, exact, index = places
        write(
            latents, rope, self.rotation, slots, rows, threshold=self.threshold, gain=self.gain, spec=self.spec,
            exact_latents=exact, exact_index=index,
        )  # fmt: skip

    def _reference(self, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return write_reference(
            latents, rope, self.rotation, threshold=self.threshold, gain=self.gain, spec=self.spec
        )


class FeedbackLayer(Layer):
    """P, mean P and the feedback weights (`kernels.write_feedback.FeedbackWriter`): rows hold `Q((c - mean) P)`."""

    def __init__(self, method: ShapedMethod, layer: int, device: Device) -> None:
        self.inverse, self.mean = method.inverse[layer], method.mean[layer]
        self.writer = prepare(
            method.rotation[layer].to(device), method.shift[layer].to(device),
            Feedback(*(tensor[layer].to(device) for tensor in method.feedback)),
            threshold=method.threshold[layer].item(), gain=method.gain[layer].item(), spec=method.spec,
        )  # fmt: skip
        self.nbytes = sum(part.nbytes for part in self.writer if isinstance(part, Tensor))

    def rotate(self, latents: Tensor) -> Tensor:
        return (latents.float() @ self.writer.rotation.float().sum(0)).to(latents.dtype)

    def add_mean(self, written: Tensor) -> Tensor:
        return written.add_(self.writer.shift)

    def restore(self, written: Tensor) -> Tensor:
        inverse, mean = self.inverse.to(written.device), self.mean.to(written.device)
        return written.float() @ inverse + mean

    def _write(self, latents: Tensor, rope: Tensor, *places: Any) -> None:
        slots, rows, exact, index = places
        write_with_feedback(latents, rope, self.writer, slots, rows, exact_latents=exact, exact_index=index)

    def _reference(self, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return write_feedback_reference(latents, rope, self.writer)


def make_layers(
    method: FourLevelMethod | ShapedMethod, numbers: Iterable[int], device: Device
) -> list[Layer]:
    """The write sides of some layers of an artifact's method.

    Raises `RolaqError` for error feedback that no kernel is made for.
    """
    if isinstance(method, ShapedMethod):
        return [FeedbackLayer(method, i, device) for i in numbers]
    return [RotatedLayer(method, i, device) for i in numbers]
