"""The fused reconstruction equals the reference bit for bit; on a CPU under Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

from rolaq.quant import restore
from rolaq.quant.quantizer import decode, encode
from rolaq.quant.spec import QuantizerSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def latents(n, d):
    """Rows of several scales; one constant, one zero, one on a boundary, one with a single outlier."""
    torch.manual_seed(n)
    z = torch.randn(n, d) * torch.logspace(-4, 3, n)[:, None] + 0.1
    z[0], z[-1] = 0.7, 0.0
    z[n // 2] = torch.tensor([-1.0, 1.0]).repeat(d // 2)
    z[n // 3] = torch.nn.functional.one_hot(torch.tensor(5), d) * 1e4
    return z.to(DEVICE)


@needs_triton
@pytest.mark.parametrize(
    ("shape", "group"), [((7, 256), 128), ((2, 9, 512), 128), ((33, 128), 64), ((0, 256), 128)]
)
@pytest.mark.parametrize(("threshold", "gain"), [(0.9810653, 1.16), (0.5, 0.9008), (1.25, 1.3002)])
def test_same_bits_as_the_reference(shape, group, threshold, gain):
    from rolaq.quant.restore_kernel import restore as fused

    spec = QuantizerSpec(group_size=group)
    rows = torch.Size(shape[:-1]).numel()
    z = latents(rows, shape[-1]).view(shape) if rows else torch.zeros(shape, device=DEVICE)
    t, g = (torch.tensor(value, device=DEVICE) for value in (threshold, gain))
    assert torch.equal(fused(z, t, g, spec), decode(encode(z, t, g, spec)))


@needs_triton
def test_strided_latents_and_a_layers_own_scalars():
    from rolaq.quant.restore_kernel import restore as fused

    wide = latents(6, 512)
    thresholds = torch.tensor([0.8, 0.95], device=DEVICE)
    gains = torch.tensor([1.0, 1.1], device=DEVICE)
    z, spec = wide[:, 128:384], QuantizerSpec()
    got = fused(z, thresholds[1], gains[1], spec)
    assert torch.equal(got, decode(encode(z, thresholds[1], gains[1], spec)))


def test_gradients_and_other_specs_take_the_reference(monkeypatch):
    monkeypatch.setattr(restore, "find_spec", lambda name: pytest.fail("the kernel was considered"))
    z = torch.randn(3, 256, device=DEVICE)
    t, g = torch.tensor(0.9, device=DEVICE), torch.tensor(1.1, device=DEVICE)
    half = QuantizerSpec(stats_dtype="float16")
    assert torch.equal(restore.restored(z, t, g, half), decode(encode(z, t, g, half)))
    spec = QuantizerSpec()
    assert restore.restored(z.requires_grad_(), t, g, spec) is not None
