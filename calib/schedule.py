"""Deterministic schedules of calibration: learning rate, sequence lengths, validation steps."""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Learning rate of step `step` in 0..steps-1: linear warm-up, then cosine to zero.

    The warm-up takes the share `warmup` of all steps and reaches `peak` on its last step; the cosine
    would be zero at step `steps`, so that every step still moves.
    """
    warm = math.ceil(steps * warmup)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def length_of_step(step: int, lengths: Sequence[int]) -> int:
    """Sequence length of a step's batch: the lengths take turns."""
    return lengths[step % len(lengths)]


def validates_after(step: int, steps: int, every: int) -> bool:
    """Whether the parameters after `step` steps (0..steps) are validated: the start, every `every`, the end."""
    return step % every == 0 or step == steps
