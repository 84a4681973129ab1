"""Write and gather: codes and parameters bit for bit, what must not change, both bases."""

import pytest
import torch

from rolaq.kernels import write as write_module
from rolaq.kernels.gather import gather
from rolaq.kernels.reference import gather_reference, pack_rows, unpack_rows, write_reference
from rolaq.kernels.write import split_rotation, write
from rolaq.quant.quantizer import encode

SHAPES = [(1, 512, 64), (37, 512, 64), (5, 256, 32), (70, 256, 32)]


def latents(n, d, device):
    """Rows of several scales; the first constant, the second zero, the third on code boundaries."""
    torch.manual_seed(n)
    z = torch.randn(n, d) * torch.logspace(-3, 2, n)[:, None] + 0.1
    z[0] = 0.7
    z[1:2] = 0.0
    z[2:3] = torch.tensor([-1.0, 1.0]).repeat(d // 2)
    return z.to(device)


def first_mismatch(got, want):
    at = (got != want).nonzero()
    return "none" if not len(at) else f"{len(at)} differ, first at {at[0].tolist()}"


@pytest.mark.parametrize(("n", "d", "d_r"), SHAPES)
@pytest.mark.parametrize("split", [True, False])
def test_rows_equal_the_reference_quantizer_bit_for_bit(n, d, d_r, split, device, monkeypatch):
    monkeypatch.setattr(write_module, "SPLIT_BELOW", 1 << 30 if split else 0)
    z, rope = latents(n, d, device), torch.randn(n, d_r).bfloat16().to(device)
    slots = torch.randperm(2 * n)[:n].to(device)
    rows = torch.randint(0, 256, (2 * n, d // 4 + 2 * d_r + d // 16), dtype=torch.uint8).to(device)
    want = rows.clone()
    want[slots] = pack_rows(encode(z, 0.93, 1.09), rope)
    write(z, rope, None, slots, rows, threshold=0.93, gain=1.09)
    assert torch.equal(rows, want), first_mismatch(rows, want)


@pytest.mark.parametrize(("n", "d", "d_r"), SHAPES)
def test_rotation_in_the_same_launch(n, d, d_r, device):
    c, rope = torch.randn(n, d).bfloat16().to(device), torch.randn(n, d_r).bfloat16().to(device)
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0].float().to(device)
    parts = split_rotation(rotation)
    assert torch.equal(parts.double().sum(0).float(), rotation)
    rows = torch.zeros(n, d // 4 + 2 * d_r + d // 16, dtype=torch.uint8, device=device)
    exact = torch.full((n + 1, d), float("nan"), dtype=torch.bfloat16, device=device)
    index = torch.arange(n, dtype=torch.int32, device=device).flip(0)
    index[0] = -1
    write(
        c,
        rope,
        parts,
        torch.arange(n, device=device),
        rows,
        threshold=0.93,
        gain=1.09,
        exact_latents=exact,
        exact_index=index,
    )
    want_rows, _ = write_reference(c, rope, rotation, threshold=0.93, gain=1.09)
    got, want = (unpack_rows(x, d, d_r)[0] for x in (rows, want_rows))
    # a code may differ only where fp32 sums of another order meet a boundary
    assert ((got - want).abs() > 1e-4 * want.abs().max()).float().mean() < 1e-4
    kept = index >= 0
    want_exact = c.double() @ rotation.double()
    # BF16 rounds by half an ulp (the interpreter truncates, by one); before it, fp32 sums of d products
    # are off by some 2^-24 of the sum of their magnitudes, which near zero is all there is
    slack = 2.0 ** (-8 if c.is_cuda else -7) * want_exact.abs() + 2.0**-22 * (
        c.double().abs() @ rotation.double().abs()
    )
    off = (exact[index[kept].long()].double() - want_exact[kept]).abs()
    assert (off <= slack[kept]).all(), (off / slack[kept]).max()
    assert torch.isnan(exact[n - 1 :].float()).all()


@pytest.mark.parametrize(("n", "d", "d_r"), SHAPES)
def test_gather_in_both_bases(n, d, d_r, device):
    rows = pack_rows(encode(torch.randn(2 * n, d), 0.93, 1.09), torch.randn(2 * n, d_r).bfloat16()).to(device)
    slots = torch.randperm(2 * n)[:n].int().to(device)
    rotation = torch.linalg.qr(torch.randn(d, d))[0].bfloat16().to(device)
    for basis in (None, rotation):
        out, rope = gather(rows, slots, d, d_r, rotation=basis)
        want, want_rope = gather_reference(rows, slots, d, d_r, rotation=basis)
        assert torch.equal(rope, want_rope)
        assert (out.float() - want).norm() <= (4e-3 if rows.is_cuda else 8e-3) * want.norm()


def test_nothing_to_do(device):
    rows = torch.zeros(4, 288, dtype=torch.uint8, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    write(
        torch.zeros(0, 512, device=device),
        torch.zeros(0, 64, device=device).bfloat16(),
        None,
        none,
        rows,
        threshold=1.0,
        gain=1.0,
    )
    assert gather(rows, none, 512, 64)[0].shape == (0, 512) and not rows.any()
