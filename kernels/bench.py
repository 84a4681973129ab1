"""Time the kernels on this GPU against BF16 ones in the same run: `python -m rolaq.kernels.bench`.

Writes rows for `docs/results/kernels.json` and prints a table. Medians of CUDA-graph replays; several
page tables take turns, so that a cache smaller than the L2 is not timed out of it more than need be.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence

import torch

from rolaq.common.errors import RolaqError, main
from rolaq.common.files import commit, markdown_table, write_json
from rolaq.kernels import baselines
from rolaq.kernels.bench_decode import bench_decode
from rolaq.kernels.bench_write import bench_write
from rolaq.kernels.cases import SPEED, WRITE_TOKENS
from rolaq.kernels.timing import POOL, Row, copy_rate, packed_pool

COLUMNS = {
    "kernel": "kernel", "case": "case", "impl": "impl", "ms": "ms", "fraction_of_copy": "of copy",
    "rel_err": "error", "registers": "registers", "spills": "spills",
}  # fmt: skip


@main
def run(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m rolaq.kernels.bench", description=__doc__)
    parser.add_argument(
        "--out", default="results/kernels.json", help="where the rows go (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-bf16", action="store_true", help="leave the BF16 kernels out")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise RolaqError("the bench needs a CUDA GPU; there is none here")
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a device copy moves {rate / 1e6:.0f} GB/s")
    found: list[Row] = []
    for d, d_r in ((512, 64), (256, 32)):
        cases = {name: case for name, case in SPEED.items() if case.d == d and options.only in name}
        if not cases:
            continue
        rows, bf16 = packed_pool(d, d_r), baselines.bf16_cache(POOL, d, d_r)
        for name, case in cases.items():
            found += bench_decode(name, case, rows, bf16, rate, not options.no_bf16)
            print(
                *(f"{name}: {row['impl']} {row['ms']:.4f} ms" for row in found if row["case"] == name),
                sep="\n",
                flush=True,
            )
        if d == 512:
            for tokens in (*WRITE_TOKENS, 1 << 17):
                if options.only in f"{tokens} tokens":
                    found += bench_write(tokens, rows, rate)
    stamp = {
        "commit": commit(), "gpu": torch.cuda.get_device_name(), "copy_gb_s": rate / 1e6,
        "command": "python -m rolaq.kernels.bench", "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    write_json(options.out, [{**row, **stamp} for row in found])
    print(markdown_table(found, COLUMNS), options.out, sep="\n")


if __name__ == "__main__":
    run()
