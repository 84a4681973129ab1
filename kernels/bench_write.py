"""Write and gather, beside the rotation alone as torch's matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.gather import gather
from rolaq.kernels.timing import POOL, Row, graph_ms, timed
from rolaq.kernels.write import split_rotation, write

D, D_R = 512, 64


def bench_write(tokens: int, rows: Tensor, rate: float) -> list[Row]:
    """Write and gather at d = 512, beside the rotation alone as torch's matrix products."""
    shape = {"case": f"{tokens} tokens", "batch": 1, "tokens": tokens, "heads": None, "d": D}
    found = []
    for kernel, impl, call, bytes_ in _calls(tokens, rows):
        torch.backends.cuda.matmul.allow_tf32 = impl == "rotation-tf32"
        row = timed({"kernel": kernel, **shape}, impl, graph_ms([call]), bytes_, rate, rel_err=None)
        found.append(row)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def _calls(tokens: int, rows: Tensor) -> list[tuple[str, str, Callable[[], Any], int]]:
    """(kernel, impl, call, bytes that it must move)."""
    c, rope = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (D, D_R))
    rotation = torch.linalg.qr(torch.randn(D, D, device="cuda"))[0].contiguous()
    parts, slots = split_rotation(rotation), torch.randperm(POOL, device="cuda")[:tokens].int()
    wide, half, out = c.float(), rotation.bfloat16(), torch.empty(tokens, D, device="cuda")
    short = torch.empty_like(c)
    stored, taken = tokens * rows.shape[1], c.nbytes + rope.nbytes

    def store() -> None:
        write(c, rope, parts, slots, rows, threshold=0.93, gain=1.09)

    def rotate() -> Tensor:
        return torch.mm(wide, rotation, out=out)

    def fetch(basis: Tensor | None) -> Callable[[], Any]:
        return lambda: gather(rows, slots, D, D_R, rotation=basis, out=short, rope_out=rope)

    return [
        ("write", "int2", store, stored + taken + parts.nbytes),
        ("write", "rotation-fp32", rotate, wide.nbytes + out.nbytes + rotation.nbytes),
        ("write", "rotation-tf32", rotate, wide.nbytes + out.nbytes + rotation.nbytes),
        ("write", "rotation-bf16", lambda: torch.mm(c, half, out=short), 2 * c.nbytes + half.nbytes),
        ("gather", "int2", fetch(None), stored + taken),
        ("gather", "int2-unrotated", fetch(half), stored + taken),
    ]
