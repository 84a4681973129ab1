"""Compare what the packed pool holds with the reference quantizer, after every write, inside the scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.reference import write_feedback_reference, write_reference
from rolaq.kernels.write_feedback import rotate_centred
from rolaq.quant.packing import unpack_codes
from rolaq.quant.quantizer import group_statistics
from rolaq.quant.spec import QuantizerSpec

BOUNDARY = 1e-4  # sigmas around a threshold within which sums in another order may change a code
PARAMETER = 1e-5  # relative difference of scale and offset that fp32 sums in another order may make


@dataclass
class Tally:
    """Writes compared, coordinates in them, codes that differ, and how many of those are not on a boundary."""

    writes: int = 0
    coordinates: int = 0
    differ: int = 0
    wrong: int = 0
    parameters_wrong: int = 0
    rope_wrong: int = 0

    def add(
        self, found: Tensor, want: Tensor, rotated: Tensor, threshold: float, spec: QuantizerSpec
    ) -> None:
        """Count one write: packed rows `[n, bytes]` as found and as wanted, and the rotated latents `[n, d]`."""
        d, d_r = rotated.shape[-1], self._rope_dim(found, rotated, spec)
        layout = spec.row(d, d_r)
        codes, rope, params = (
            (found[:, p.offset : p.offset + p.size], want[:, p.offset : p.offset + p.size])
            for p in layout[:3]
        )
        differ = unpack_codes(codes[0]) != unpack_codes(codes[1])
        x = group_statistics(rotated, spec)[0].flatten(-2).abs()
        near = torch.minimum(x, (x - threshold).abs()) < BOUNDARY
        scale, expected = (p.contiguous().view(torch.float32) for p in params)
        off = (scale - expected).abs() > PARAMETER * expected.abs().amax(-1, keepdim=True)
        self.writes += 1
        self.coordinates += differ.numel()
        self.differ += int(differ.sum())
        self.wrong += int((differ & ~near).sum())
        self.parameters_wrong += int(off.sum())
        self.rope_wrong += int((rope[0] != rope[1]).any(-1).sum())

    @staticmethod
    def _rope_dim(rows: Tensor, rotated: Tensor, spec: QuantizerSpec) -> int:
        return (rows.shape[-1] - spec.bytes_per_token(rotated.shape[-1], 0)) // 2


def rotated_latents(latents: Tensor, rotation: Tensor) -> Tensor:
    """`latents [n, d]` times R, summed in fp64, rounded once to fp32."""
    return (latents.double() @ rotation.to(latents.device).double()).float()


def compare_codes(path: Path) -> None:
    """Watch every write of the packed pool that no CUDA graph replays; the tally goes to ``path``."""
    from rolaq.serve.pool import PackedPool

    original, tally = PackedPool.store, Tally()
    path.parent.mkdir(parents=True, exist_ok=True)

    def store(
        pool: Any, layer_id: int, slots: Tensor, latents: Tensor, rope: Tensor, exact_row: Tensor
    ) -> None:
        original(pool, layer_id, slots, latents, rope, exact_row)
        if latents.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        check(pool, layer_id, slots, latents, rope, tally)
        path.write_text(json.dumps(asdict(tally)), encoding="utf-8")

    PackedPool.store = store  # type: ignore[method-assign, assignment]


def check(
    pool: Any, layer_id: int, slots: Tensor, latents: Tensor, rope: Tensor, tally: Tally,
    reference: Callable[..., tuple[Tensor, Tensor]] = write_reference,
) -> None:  # fmt: skip
    """Compare the rows at `slots` with what `reference` makes of the same latents.

    Dummy batches, which write one slot several times, are left out.
    """
    if len(slots.unique()) < len(slots):
        return
    artifact = pool.artifact
    if artifact.config.feedback:
        _check_feedback(pool, layer_id, slots, latents, rope, tally)
        return
    threshold, gain = artifact.threshold[layer_id].item(), artifact.gain[layer_id].item()
    z = rotated_latents(latents, artifact.rotation[layer_id])
    want, _ = reference(z, rope.bfloat16(), None, threshold=threshold, gain=gain, spec=pool.spec)
    tally.add(pool.rows(layer_id)[slots.long()], want, z, threshold, pool.spec)


def _check_feedback(
    pool: Any, layer_id: int, slots: Tensor, latents: Tensor, rope: Tensor, tally: Tally
) -> None:
    """With error feedback one code on a boundary turns all that follow, so nothing is excused: the reference is given
    the same products that the write took."""
    writer, on_gpu = pool.layer(layer_id).writer, latents.is_cuda
    z = rotate_centred(latents, writer) if on_gpu else latents
    want, exact = write_feedback_reference(z, rope.bfloat16(), writer, rotated=on_gpu)
    tally.add(pool.rows(layer_id)[slots.long()], want, exact.float(), float("inf"), pool.spec)
