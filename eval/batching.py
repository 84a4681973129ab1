"""How many rows go through the model at once: found out on the device, halved when memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rolaq.common.errors import RolaqError
from rolaq.eval.divergence import batch_rows

if TYPE_CHECKING:
    from rolaq.eval.lm import QuantizedLM

CPU_TOKENS = 4096
CUDNN_FAILED = "mha_graph"
MOST = 512
SHARE = 0.6
"""Of the free memory: left-over rows, fragments and the cache's growth take the rest."""


def fit(lm: QuantizedLM, longest: int, generated: int) -> int:
    """Rows of ``longest`` tokens (of them ``generated`` new ones) that the method in use can take at once.

    On a GPU from the memory that one row takes; on a CPU a few thousand tokens, more are not faster.
    """
    if lm.device.type != "cuda":
        return max(1, CPU_TOKENS // longest)
    free = torch.cuda.mem_get_info(lm.device)[0]
    free += torch.cuda.memory_reserved(lm.device) - torch.cuda.memory_allocated(lm.device)
    rows = int(SHARE * free / _row_bytes(lm, longest, generated > 0))
    return max(1, min(MOST, rows, batch_rows(longest, MOST * longest)))


def _row_bytes(lm: QuantizedLM, tokens: int, generates: bool) -> int:
    """Peak memory of one row: all its log-probabilities, or its cache and the last position's."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=lm.device)
    before = torch.cuda.memory_allocated(lm.device)
    torch.cuda.reset_peak_memory_stats(lm.device)
    with torch.no_grad(), lm.attached():
        if generates:
            lm.model(ids, use_cache=True, logits_to_keep=1)
        else:
            lm.model(ids).logits.log_softmax(-1)
    return max(1, torch.cuda.max_memory_allocated(lm.device) - before)


@contextmanager
def recovering(lm: QuantizedLM) -> Iterator[None]:
    """Turn what another attempt can mend into its remedy: memory that ran out, cuDNN's attention that failed.

    cuDNN compiles a kernel for every new shape and can fail at that in the middle of a run; it is then turned
    off, and PyTorch's own fused kernels serve the next attempt.

    Raises:
        RolaqError: a single row does not fit.
        RuntimeError: any other failure.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if lm.batch_size <= 1:
            raise RolaqError(
                "one row does not fit the GPU's memory: use model.device=map, or less model.context"
            ) from error
        lm.batch_size_per_gpu = lm.batch_size // 2
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if CUDNN_FAILED not in str(error) or not torch.backends.cuda.cudnn_sdp_enabled():
            raise
        print("warning: cuDNN's attention failed; going on with PyTorch's own kernels", file=sys.stderr)
        torch.backends.cuda.enable_cudnn_sdp(False)
