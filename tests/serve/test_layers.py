"""The write sides of layers: what they store, how their basis is left, and their bytes; no SGLang needed."""

from types import SimpleNamespace

import make_model
import pytest
import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.kernels.reference import unpack_rows, write_feedback_reference
from rolaq.kernels.write_feedback import rotate_centred
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.spec import QuantizerSpec
from rolaq.serve.layers import Layer, make_layers
from rolaq.serve.refusals import refuse_artifact
from rolaq.serve.sizing import Sizing

METHODS = ("rolaq", "rolaq-feedback")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 40


def method_of(name: str) -> FourLevelMethod | ShapedMethod:
    tensors, block = make_model.random_tensors(2, name)
    spec = QuantizerSpec(feedback_block=block)
    tensors = {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}
    method = ShapedMethod(name, tensors, spec) if block else FourLevelMethod(name, *tensors.values(), spec)
    return method.to(DEVICE)


def pool() -> tuple[Tensor, Tensor, Tensor]:
    """Empty packed rows and exact rows, and the exact row of each latent."""
    rows = torch.zeros(2 * N, QuantizerSpec().bytes_per_token(256, 32), dtype=torch.uint8, device=DEVICE)
    exact = torch.zeros(N + 1, 256, dtype=torch.bfloat16, device=DEVICE)
    return rows, exact, torch.where(torch.arange(N) % 3 == 0, torch.arange(N), -1).int().to(DEVICE)


@pytest.fixture(params=METHODS)
def written(request) -> tuple:
    """A method, its last layer's write side, latents, and what the layer has stored of them: rows, exact ones."""
    method = method_of(request.param)
    layer = make_layers(method, range(1, 2), DEVICE)[0]
    torch.manual_seed(1)
    latents, rope = (torch.randn(N, n).bfloat16().to(DEVICE) for n in (256, 32))
    rows, exact, exact_row = pool()
    layer.store(latents, rope, torch.arange(N, device=DEVICE) * 2, rows, exact, exact_row)
    return method, layer, latents.float(), unpack_rows(rows[::2], 256, 32)[0], exact


def read(method: FourLevelMethod | ShapedMethod, layer: Layer, z: Tensor) -> Tensor:
    """As a folded projection to the latent itself reads rows: the identity times the read matrix."""
    return layer.add_mean(z.clone()) @ method.read_matrix[1].T


def test_rows_are_restored_and_read_as_the_method_reconstructs_them(written) -> None:
    method, layer, latents, z, _ = written
    want = method.reconstruct(latents[None], 1)[0]
    for got in (layer.restore(z), read(method, layer, z)):
        close = torch.isclose(got, want, atol=1e-4, rtol=1e-4).all(-1)
        assert close.float().mean() > 0.9  # sums of another order turn a code here and there


def test_protected_rows_and_a_chunks_own_latents_read_as_the_latents(written) -> None:
    method, layer, latents, _, exact = written
    kept = torch.arange(N, device=DEVICE) % 3 == 0
    assert not exact[:N][~kept].any() and not exact[N].any()
    torch.testing.assert_close(
        read(method, layer, exact[:N][kept].float()), latents[kept], atol=0.1, rtol=0.02
    )
    own = layer.rotate(latents) @ method.read_matrix[1].T
    torch.testing.assert_close(own, latents, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("protect", [False, True])
def test_the_write_kernel_stores_what_its_reference_does(protect) -> None:
    """Bit for bit on the latents that the kernel itself rotated; on a CPU under Triton's interpreter."""
    layer = make_layers(method_of("rolaq-feedback"), [0], DEVICE)[0]
    torch.manual_seed(2)
    latents, rope = (torch.randn(N, n).bfloat16().to(DEVICE) for n in (256, 32))
    rows, kept, exact_row = pool()
    exact, index = (kept, exact_row) if protect else (None, None)
    layer._write(latents, rope, torch.arange(N, device=DEVICE), rows, exact, index)
    rotated = rotate_centred(latents, layer.writer)
    want = write_feedback_reference(rotated, rope, layer.writer, rotated=True)[0]
    assert torch.equal(rows[:N], want)
    _, own = layer._reference(latents, rope)
    torch.testing.assert_close(rotated, own.float(), rtol=2**-8, atol=1e-4)  # half an ulp of BF16
    if protect:  # the interpreter truncates to BF16
        chosen = exact_row >= 0
        torch.testing.assert_close(kept[:N][chosen].float(), rotated[chosen], rtol=2**-7, atol=1e-3)
        assert not kept[:N][~chosen].any()


@pytest.mark.parametrize("layers", [1, 2])
def test_bytes_of_error_feedback_are_counted(layers) -> None:
    sides = make_layers(method_of("rolaq-feedback"), range(layers), DEVICE)
    plain, shaped = (Sizing(layers, 256, 32, 1, 0, 0, 1, feedback=f) for f in (False, True))
    assert sum(side.nbytes for side in sides) == shaped.write_bytes
    assert shaped.fixed - plain.fixed == layers * (256 * 256 + 8 * 256)


@pytest.mark.parametrize(
    ("method", "spec", "says"),
    [
        ("rolaq", {"group_size": 64}, "group_size 64, which no kernel is made for"),
        ("rolaq", {"stats_dtype": "float16"}, "quant.spec.stats_dtype=float32"),
        ("rolaq-feedback", {"feedback_block": 16}, "quant.spec.feedback_block=32 or 64 or 128"),
        ("rolaq", {}, None),
        ("rolaq-feedback", {"feedback_block": 64}, None),
    ],
)
def test_artifacts_without_a_kernel_are_refused(method, spec, says) -> None:
    config = SimpleNamespace(spec=QuantizerSpec(**spec), feedback=method == "rolaq-feedback")
    artifact = SimpleNamespace(id="0123", config=config)
    if says is None:
        refuse_artifact(artifact)
        return
    with pytest.raises(RolaqError, match=says):
        refuse_artifact(artifact)
