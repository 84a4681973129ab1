"""Write and gather, beside the rotation alone as torch's matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.gather import gather
from rolaq.kernels.timing import POOL, Row, graph_ms
from rolaq.kernels.write import split_rotation, write


def bench_write(tokens: int, rows: Tensor, rate: float) -> list[Row]:
    """Write and gather at d = 512, beside the rotation alone as torch's matrix products."""
    d, d_r = 512, 64
    c, rope = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (d, d_r))
    rotation = torch.linalg.qr(torch.randn(d, d, device="cuda"))[0].contiguous()
    parts, slots = split_rotation(rotation), torch.randperm(POOL, device="cuda")[:tokens].int()
    wide, half, out = c.float(), rotation.bfloat16(), torch.empty(tokens, d, device="cuda")
    short = torch.empty(tokens, d, device="cuda", dtype=torch.bfloat16)
    shape = {"case": f"{tokens} tokens", "batch": 1, "tokens": tokens, "heads": None, "d": d}

    def row(kernel: str, impl: str, call: Callable[[], Any], bytes_: int) -> Row:
        ms = graph_ms([call])
        return {
            "kernel": kernel,
            **shape,
            "impl": impl,
            "ms": ms,
            "bytes": bytes_,
            "fraction_of_copy": bytes_ / ms / rate,
            "rel_err": None,
        }

    stored = tokens * rows.shape[1]
    found = [
        row(
            "write",
            "int2",
            lambda: write(c, rope, parts, slots, rows, threshold=0.93, gain=1.09),
            stored + c.nbytes + rope.nbytes + parts.nbytes,
        ),
        row(
            "write",
            "rotation-fp32",
            lambda: torch.mm(wide, rotation, out=out),
            wide.nbytes + out.nbytes + rotation.nbytes,
        ),
        row(
            "write",
            "rotation-bf16",
            lambda: torch.mm(c, half, out=short),
            c.nbytes + short.nbytes + half.nbytes,
        ),
        row(
            "gather",
            "int2",
            lambda: gather(rows, slots, d, d_r, out=short, rope_out=rope),
            stored + short.nbytes + rope.nbytes,
        ),
        row(
            "gather",
            "int2-unrotated",
            lambda: gather(rows, slots, d, d_r, rotation=half, out=short, rope_out=rope),
            stored + short.nbytes + rope.nbytes,
        ),
    ]
    torch.backends.cuda.matmul.allow_tf32 = True
    found.insert(
        2,
        row(
            "write",
            "rotation-tf32",
            lambda: torch.mm(wide, rotation, out=out),
            wide.nbytes + out.nbytes + rotation.nbytes,
        ),
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    return found
