"""Each kernel once on each case of the list, without references: what a sanitizer has to see.

compute-sanitizer --tool memcheck python -m rolaq.kernels.launches
compute-sanitizer --tool racecheck python -m rolaq.kernels.launches
"""

from __future__ import annotations

import torch

from rolaq.common.errors import RolaqError, main
from rolaq.kernels import write as write_module
from rolaq.kernels.cases import CORNER, SMALL, build
from rolaq.kernels.decode import IMPLEMENTATIONS, decode
from rolaq.kernels.gather import gather
from rolaq.kernels.write import split_rotation, write

WRITES = [(1, 512, 64), (37, 512, 64), (70, 256, 32)]


def launch_decode() -> int:
    """Both decode kernels, with plan and merge, on every case; returns the number of calls."""
    for case in (*SMALL, *CORNER):
        arguments = build(case, "cuda")
        for impl in IMPLEMENTATIONS:
            decode(**arguments, impl=impl)
    return len(IMPLEMENTATIONS) * len((*SMALL, *CORNER))


def launch_write(n: int, d: int, d_r: int) -> int:
    """Write, one program a group and one for all, with and without a rotation; gather in both bases."""
    latents, rope = (torch.randn(n, width, device="cuda").bfloat16() for width in (d, d_r))
    rotation = torch.linalg.qr(torch.randn(d, d))[0].to("cuda")
    rows = torch.zeros(2 * n, d // 4 + 2 * d_r + d // 16, dtype=torch.uint8, device="cuda")
    exact = torch.zeros(n, d, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(2 * n, device="cuda")[:n].int()
    index = torch.arange(n, dtype=torch.int32, device="cuda")
    for write_module.SPLIT_BELOW in (0, 1 << 30):
        for parts in (None, split_rotation(rotation)):
            write(
                latents, rope, parts, slots, rows, threshold=0.93, gain=1.09, exact_latents=exact, exact_index=index
            )  # fmt: skip
    for basis in (None, rotation.bfloat16()):
        gather(rows, slots, d, d_r, rotation=basis)
    return 6


@main
def run() -> None:
    """The command."""
    if not torch.cuda.is_available():
        raise RolaqError("sanitizers watch a CUDA GPU; there is none here")
    calls = launch_decode() + sum(launch_write(*shape) for shape in WRITES)
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    run()
