"""Quantize and reconstruct in one launch (Triton), each operation rounded as in `quantizer`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rolaq.quant.spec import QuantizerSpec

ROWS = 8  # groups that a program handles


@triton.jit
def _restore(z, out, threshold, gain, groups, double_inner, eps, G: tl.constexpr, M: tl.constexpr):
    """M groups of G coordinates: statistics with sums in fp64, codes, and back."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    at = row.to(tl.int64)[:, None] * G + tl.arange(0, G)[None, :]
    ok = (row < groups)[:, None]
    x = tl.load(z + at, mask=ok, other=0.0)
    mean = (tl.sum(x.to(tl.float64), 1) / G).to(tl.float32)
    centred = x - mean[:, None]
    wide = centred.to(tl.float64)
    sigma = tl.sqrt_rn((tl.sum(wide * wide, 1) / G).to(tl.float32) + eps)
    x = tl.div_rn(centred, tl.broadcast_to(sigma[:, None], [M, G]))
    t = tl.load(threshold)
    code = (x >= -t).to(tl.float32) + (x >= 0.0).to(tl.float32) + (x >= t).to(tl.float32)
    scale = (double_inner * tl.load(gain)) * sigma
    offset = mean - 1.5 * scale
    tl.store(out + at, code * scale[:, None] + offset[:, None], mask=ok)


def restore(z: Tensor, threshold: Tensor, gain: Tensor, spec: QuantizerSpec) -> Tensor:
    """`quantizer.decode(quantizer.encode(z))`, bit for bit, for `z [..., d]` fp32 and scalar threshold and gain."""
    z, (threshold, gain) = z.contiguous(), (item.float().contiguous() for item in (threshold, gain))
    out = torch.empty_like(z)
    groups = z.numel() // spec.group_size
    if groups:
        # without contraction: a product and a sum are rounded one by one
        _restore[(triton.cdiv(groups, ROWS),)](
            z, out, threshold, gain, groups, 2 * spec.a_in, spec.sigma_eps, G=spec.group_size, M=ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
