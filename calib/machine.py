"""The process and its device: threads, seeds, precision, memory."""

from __future__ import annotations

import random
import resource
import sys

import torch

from rolaq.calib.config import CalibrateConfig


def prepare_machine(settings: CalibrateConfig) -> None:
    """Set threads, seeds and precision for a run.

    Rotations need full fp32 products, so TF32 is off. `calib.deterministic` also makes CUDA repeatable
    bit for bit; a model with an operation that has no such form then stops with PyTorch's message.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if settings.calib.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> dict[str, float | str]:
    """Highest memory use so far: `gb` (10^9 bytes) of `kind` `cuda` (allocated tensors) or `rss` (process)."""
    if device.type == "cuda":
        return {"gb": torch.cuda.max_memory_allocated(device) / 1e9, "kind": "cuda"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, "kind": "rss"}
