"""The tensor-core kernel as compiled for Hopper, without a GPU: no spills, the instructions it lives on."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from rolaq.kernels.decode_gluon import OPTIONS, decode_item as kernel

d, d_r, sink, recent = map(int, sys.argv[1:])
constants = dict(QUERIES=1, HEADS=16, D=d, DR=d_r, PAGE=64, SINK=sink, RECENT=recent)
kinds = dict(q_ptr="*bf16", q_rope_ptr="*bf16", rows16="*i16", rows32="*fp32", exact_ptr="*bf16", part_ptr="*fp32",
             lse_ptr="*fp32", scale="fp32")
names = kernel.arg_names
types = {n: "constexpr" if n in constants else kinds.get(n, "*i32" if n[-4:] == "_ptr" or n == "exact_index" else "i32") for n in names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n][0] == "*" or n[1:] in ("_row", "_col")}
source = GluonASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()}, aligned)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS).asm["ptx"]
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(ptx)
    file.flush()
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
number = lambda pattern: int(re.search(pattern, log).group(1))
print(json.dumps({
    "registers": number(r"Used (\\d+) registers"),
    "spilled": number(r"(\\d+) bytes spill stores"),
    "matrix": ptx.count("mma.sync.aligned.m16n8k16"),
    "ldmatrix": ptx.count("ldmatrix.sync"),
    "copies": ptx.count("cp.async.cg.shared.global"),
}))
"""


@pytest.mark.parametrize(("d", "d_r", "sink", "recent"), [(512, 64, 0, 0), (512, 64, 4, 16), (256, 32, 0, 0)])
def test_compiles_for_hopper_without_spills(d, d_r, sink, recent):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", SCRIPT, *map(str, (d, d_r, sink, recent))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spilled"] <= 16 and found["registers"] <= 255, found
    assert (
        found["matrix"] >= 136 * d // 512 and found["ldmatrix"] >= 40 * d // 512 and found["copies"] >= 5
    ), found
