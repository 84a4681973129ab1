"""The three device operations of the packed cache: kernels on a GPU, their references on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rolaq.kernels.decode import decode
from rolaq.kernels.exact import Exact
from rolaq.kernels.gather import gather
from rolaq.kernels.plan import Plan
from rolaq.kernels.reference import decode_reference, gather_reference, write_reference
from rolaq.kernels.write import split_rotation, write
from rolaq.quant.spec import QuantizerSpec


class Layer:
    """One layer's write side: R `[d, d]`, T and g, in the form the device's write takes."""

    def __init__(self, rotation: Tensor, threshold: float, gain: float, device: torch.device | str) -> None:
        rotation = rotation.to(device, torch.float32)
        self.rotation = split_rotation(rotation) if rotation.is_cuda else rotation
        self.threshold, self.gain = threshold, gain

    @property
    def nbytes(self) -> int:
        """Bytes of the rotation."""
        return self.rotation.nbytes

    def rotate(self, latents: Tensor) -> Tensor:
        """`latents [n, d] @ R` in fp32, in the latents' dtype."""
        rotation = self.rotation.float().sum(0) if self.rotation.ndim == 3 else self.rotation
        return (latents.float() @ rotation).to(latents.dtype)


def store(
    latents: Tensor, rope: Tensor, layer: Layer, slots: Tensor, rows: Tensor, exact: Tensor, exact_row: Tensor,
    spec: QuantizerSpec,
) -> None:  # fmt: skip
    """Rotate, quantize and store latents `[n, d]` with RoPE keys `[n, d_r]` in `rows[slots]`; where
    `exact_row [n]` is not negative, also the rotated latent in `exact[exact_row]`, BF16."""
    if latents.is_cuda:
        protect = len(exact) > 0
        write(
            latents, rope, layer.rotation, slots, rows, threshold=layer.threshold, gain=layer.gain, spec=spec,
            exact_latents=exact if protect else None, exact_index=exact_row if protect else None,
        )  # fmt: skip
        return
    packed, rotated = write_reference(
        latents, rope.bfloat16(), layer.rotation, threshold=layer.threshold, gain=layer.gain, spec=spec
    )
    rows[slots.long()] = packed
    kept = exact_row >= 0
    exact[exact_row[kept].long()] = rotated[kept]


def attend(
    q: Tensor, q_rope: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, *, page_size: int,
    scale: float, exact: Exact | None, plan: Plan | None, workspace: tuple[Tensor, Tensor] | None,
    spec: QuantizerSpec,
) -> Tensor:  # fmt: skip
    """Attention of one new token a sequence, `[B, 1, H, d]` BF16, in the rotated basis (`kernels.decode`)."""
    if q.is_cuda:
        return decode(
            q, q_rope, rows, page_table, lengths, page_size=page_size, scale=scale, exact=exact, plan=plan,
            workspace=workspace, spec=spec,
        )[0]  # fmt: skip
    out, _ = decode_reference(
        q, q_rope, rows, page_table, lengths, page_size=page_size, scale=scale, exact=exact
    )
    return out.to(q.dtype)


def fetch(rows: Tensor, slots: Tensor, d: int, d_r: int, spec: QuantizerSpec) -> tuple[Tensor, Tensor]:
    """Latents `[n, d]` in the rotated basis and RoPE keys `[n, d_r]` of `rows[slots]`, BF16."""
    if rows.is_cuda:
        return gather(rows, slots, d, d_r, spec=spec)
    latents, rope = gather_reference(rows, slots, d, d_r, spec=spec)
    return latents.bfloat16(), rope
