"""Min-max round-to-nearest quantization, the arithmetic under RTN, QuaRot and KVarN."""

from __future__ import annotations

import torch
from torch import Tensor


def affine(x: Tensor, low: Tensor, high: Tensor, bits: int = 2, floor: float = 0.0) -> Tensor:
    """`x` on the `2**bits` evenly spaced levels from `low` to `high`.

    Args:
        x: fp32 values; `low` and `high` broadcast to it.
        floor: smallest step, for KVarN's clamp.

    Returns:
        `low + step * clip(round((x - low) / step), 0, 2**bits - 1)` in fp32, rounding half to
        even; exactly `low` where the step is 0.
    """
    top = 2**bits - 1
    step = ((high - low) / top).clamp_min(floor)
    # A zero step means a constant group: every code is 0, so any divisor will do.
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((x - low) / divisor).round_().clamp_(0, top)
    return low + step * codes


def rtn(x: Tensor, group_size: int, bits: int = 2) -> Tensor:
    """Round-to-nearest over groups of latent coordinates (RoLaQ, App. A.2).

    Args:
        x: `[..., d]`, any float dtype, `d` divisible by `group_size`.

    Returns:
        The reconstruction `[..., d]` in fp32. Groups whose values are all equal are exact.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    return affine(groups, low, high, bits).flatten(-2)
