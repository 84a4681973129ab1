"""`decode(encode(z))` for evaluation: one pass over the latents on a GPU, the reference elsewhere, the same bits."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rolaq.quant.quantizer import decode, encode
from rolaq.quant.spec import QuantizerSpec


def restored(z: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec) -> Tensor:
    """Rotated latents `z [..., d]` fp32 as the cache gives them back, fp32; threshold and gain are scalars.

    `quantizer.decode(quantizer.encode(...))`, whose some twenty passes over the latents are most of what
    simulated quantization costs a small model. Where gradients are wanted it is the reference itself.
    """
    wanted = torch.is_grad_enabled() and any(item.requires_grad for item in (z, threshold, gain))
    if not z.is_cuda or wanted or not _fits(spec) or find_spec("triton") is None:
        return decode(encode(z, threshold, gain, spec))
    from rolaq.quant.restore_kernel import restore  # Triton takes its time to import

    return restore(z, threshold, gain, spec)


def _fits(spec: QuantizerSpec) -> bool:
    """Two bits, statistics as they are, and groups whose mean is a sum times a power of two."""
    return spec.bits == 2 and spec.stats_dtype == "float32" and spec.group_size & (spec.group_size - 1) == 0
