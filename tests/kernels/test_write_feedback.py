"""The write with error feedback: rows bit for bit against the reference quantizer."""

import os
import subprocess
import sys

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.kernels import write_feedback as module
from rolaq.kernels.reference import pack_rows, unpack_rows, write_feedback_reference
from rolaq.kernels.write_feedback import prepare, write_with_feedback
from rolaq.quant.feedback import Feedback, encode_with_feedback, quantize_feedback
from rolaq.quant.shaping import feedback_matrix, regularise
from rolaq.quant.spec import QuantizerSpec

THRESHOLD, GAIN = 1.07, 1.17
SHAPES = [(1, 512, 64), (35, 512, 64), (5, 256, 32), (70, 256, 32)]


def latents(n, d):
    """Rows of several scales; the first constant, the second zero, the third on code boundaries."""
    generator = torch.Generator().manual_seed(n)
    z = torch.randn(n, d, generator=generator) * torch.logspace(-3, 2, n)[:, None] + 0.1
    z[0] = 0.7
    z[1:2] = 0.0
    z[2:3] = torch.tensor([-1.0, 1.0]).repeat(d // 2)
    z[3:4, : d // 2] *= 1e3  # groups of very different scales
    return z


def layer(d, block, device):
    """Rotation, shift and a feedback with weights of all sizes, on the device."""
    generator = torch.Generator().manual_seed(d + block)
    draw = torch.randn(3, d, d, generator=generator, dtype=torch.float64)
    m = regularise(draw[0] @ torch.diag(torch.logspace(0, -3, d, dtype=torch.float64)) @ draw[0].T, 0.05)
    feedback = quantize_feedback(feedback_matrix(m, block))
    rotation = torch.linalg.qr(draw[1])[0].float() * (1 + 0.2 * draw[2, 0].float())
    feedback = Feedback(*(t.to(device) for t in feedback))
    return rotation.to(device), (0.1 * draw[2, 1]).float().to(device), feedback


@pytest.mark.parametrize(("n", "d", "d_r"), SHAPES)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("small", [True, False])
def test_rows_equal_the_reference_bit_for_bit(n, d, d_r, block, small, device, monkeypatch):
    monkeypatch.setattr(module, "MANY", 1 << 30 if small else 0)
    spec = QuantizerSpec(feedback_block=block)
    rotation, shift, feedback = layer(d, block, device)
    z, rope = latents(n, d).to(device), torch.randn(n, d_r).bfloat16().to(device)
    slots = torch.randperm(2 * n)[:n].to(device)
    rows = torch.randint(0, 256, (2 * n, d // 4 + 2 * d_r + d // 16), dtype=torch.uint8).to(device)
    want = rows.clone()
    scalars = (torch.tensor(v, device=device) for v in (THRESHOLD, GAIN))
    want[slots] = pack_rows(encode_with_feedback(z, *scalars, feedback, spec), rope)
    writer = prepare(rotation, shift, feedback, threshold=THRESHOLD, gain=GAIN, spec=spec)
    write_with_feedback(z, rope, writer, slots, rows, rotated=True)
    assert torch.equal(rows, want)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("n", "d", "d_r"), [(35, 512, 64), (18, 256, 32)])
def test_rotation_shift_and_protected_tokens(n, d, d_r, small, device, monkeypatch):
    """From the model's latents; what is kept exact is `c P - shift`, and it gives the rows their codes."""
    monkeypatch.setattr(module, "MANY", 1 << 30 if small else 0)
    spec = QuantizerSpec(feedback_block=32)
    rotation, shift, feedback = layer(d, 32, device)
    writer = prepare(rotation, shift, feedback, threshold=THRESHOLD, gain=GAIN, spec=spec)
    c, rope = torch.randn(n, d).bfloat16().to(device), torch.randn(n, d_r).bfloat16().to(device)
    rows = torch.zeros(n, d // 4 + 2 * d_r + d // 16, dtype=torch.uint8, device=device)
    exact = torch.full((n + 1, d), float("nan"), dtype=torch.bfloat16, device=device)
    index = torch.arange(n, dtype=torch.int32, device=device).flip(0)
    index[0] = -1
    order = torch.arange(n, device=device)
    write_with_feedback(c, rope, writer, order, rows, exact_latents=exact, exact_index=index)
    z = (c.double() @ rotation.double()).float() - shift
    # the interpreter truncates where a GPU rounds
    assert torch.allclose(exact[index[1:].long()].float(), z[1:], rtol=2**-7, atol=1e-3)
    assert torch.isnan(exact[n - 1 :].float()).all()
    scalars = (torch.tensor(v, device=device) for v in (THRESHOLD, GAIN))
    want = pack_rows(encode_with_feedback(z, *scalars, feedback, spec), rope)
    reference, kept = write_feedback_reference(c, rope, writer)
    assert torch.equal(reference, want) and torch.equal(kept, z.bfloat16())
    got, want = (unpack_rows(r, d, d_r)[0] for r in (rows, want))
    # fp32 sums of another order flip a code at a boundary, and the chain then takes another turn in that row
    same = ((got - want).abs() <= 1e-4 * want.abs().max()).all(-1)
    assert same.float().mean() > 0.8


def test_shapes_without_a_kernel():
    rotation, shift, feedback = layer(256, 32, "cpu")
    with pytest.raises(RolaqError, match="feedback_block 16; d is 256 or 512"):
        prepare(rotation, shift, feedback, threshold=1.0, gain=1.0, spec=QuantizerSpec(feedback_block=16))
    writer = prepare(
        rotation, shift, feedback, threshold=1.0, gain=1.0, spec=QuantizerSpec(feedback_block=32)
    )
    rows = torch.zeros(2, 100, dtype=torch.uint8)
    with pytest.raises(RolaqError, match="RoPE 16"):
        write_with_feedback(torch.zeros(2, 256), torch.zeros(2, 16), writer, torch.arange(2), rows)


COMPILE = """
import re, subprocess, tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rolaq.kernels.write_feedback import CHAIN, _chain_kernel as kernel

block, warps = CHAIN[0]
constants = dict(D=512, DR=64, M=block, BLOCK=32, LEVELS=64.0, TOP=127.0, EXACT=True)
kinds = dict(rope="*i16", weight="*i8", slots="*i64", rows16="*i16", exact="*bf16", exact_index="*i32", n="i32",
             threshold="fp32", factor="fp32", per_step="fp32", eps="fp32")
names = kernel.arg_names
types = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names}
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
options = dict(num_warps=warps, num_stages=2, enable_fp_fusion=False)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(ptx)
    file.flush()
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
print(re.search(r"(\\d+) bytes spill stores", log).group(1), ptx.count("s32.s8"), ptx.count("fma.rn.f32"))
"""


def test_compiles_for_hopper_with_int8_matrix_units():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    spilled, int8, fused = map(int, done.stdout.split())
    # a fused multiply-add would round once where the reference rounds twice
    assert (spilled, fused) == (0, 0) and int8 >= 18
