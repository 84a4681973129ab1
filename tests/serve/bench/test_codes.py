"""The comparison of codes: what it must find, and what it must let pass."""

from types import SimpleNamespace

import make_model
import pytest
import torch

from rolaq.kernels.reference import pack_rows, write_reference
from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.quantizer import Codes, encode
from rolaq.quant.spec import QuantizerSpec
from rolaq.serve.bench.codes import Tally, check, rotated_latents
from rolaq.serve.layers import make_layers

D, DR, N = 256, 32, 24
THRESHOLD, GAIN = 0.93, 1.09
SPEC = QuantizerSpec()


@pytest.fixture
def written():
    """A pool, the slots of some latents, the latents and the RoPE keys, stored by the reference."""
    torch.manual_seed(0)
    rotation = block_hadamard(D, 128)
    latents, rope = torch.randn(N, D).bfloat16(), torch.randn(N, DR).bfloat16()
    slots = torch.randperm(64)[:N]
    rows = torch.zeros(64, SPEC.bytes_per_token(D, DR), dtype=torch.uint8)
    rows[slots] = write_reference(latents, rope, rotation, threshold=THRESHOLD, gain=GAIN)[0]
    tensors = {
        "rotation": rotation[None],
        "threshold": torch.tensor([THRESHOLD]),
        "gain": torch.tensor([GAIN]),
    }
    artifact = SimpleNamespace(config=SimpleNamespace(feedback=False), **tensors)
    pool = SimpleNamespace(artifact=artifact, spec=SPEC, rows=lambda _: rows, all_rows=rows)
    return pool, slots, latents, rope


def tally(pool, slots, latents, rope):
    found = Tally()
    check(pool, 0, slots, latents, rope, found)
    return found


def test_what_the_reference_stored_is_right(written):
    assert tally(*written) == Tally(writes=1, coordinates=N * D)


def test_changed_codes_are_found_unless_on_a_boundary(written):
    pool, slots, latents, rope = written
    z = rotated_latents(latents, pool.artifact.rotation[0])
    x = z.unflatten(-1, (2, 128))
    x = ((x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)).flatten(-2)
    good = encode(z, THRESHOLD, GAIN)
    codes = good.codes.clone()
    far = ((x.abs() - THRESHOLD).abs() > 0.1) & (x.abs() > 0.1)
    at = far.nonzero()[:7].unbind(1)
    codes[at] = 3 - codes[at]
    pool.all_rows[slots] = pack_rows(Codes(codes, good.scale, good.offset), rope)
    found = tally(pool, slots, latents, rope)
    assert (found.differ, found.wrong, found.parameters_wrong) == (7, 7, 0)


def test_a_code_on_a_boundary_counts_apart(written):
    pool, _, latents, rope = written
    z = rotated_latents(latents, pool.artifact.rotation[0])
    z[0] = torch.tensor([-1.0, 1.0]).repeat(D // 2) * 0.7  # one deviation from the mean
    want, shifted = encode(z, 1.0 - 1e-6, GAIN), encode(z, 1.0 + 1e-6, GAIN)
    found = Tally()
    found.add(pack_rows(shifted, rope), pack_rows(want, rope), z, 1.0, SPEC)
    assert found.differ >= D and found.wrong == 0


def test_wrong_scales_and_rope_keys_are_found(written):
    pool, slots, latents, rope = written
    good = encode(rotated_latents(latents, pool.artifact.rotation[0]), THRESHOLD, GAIN)
    scale = good.scale.clone()
    scale[3, 1] *= 1.001
    other = rope.clone()
    other[5, 0] += 1
    pool.all_rows[slots] = pack_rows(Codes(good.codes, scale, good.offset), other)
    found = tally(pool, slots, latents, rope)
    assert (found.wrong, found.parameters_wrong, found.rope_wrong) == (0, 1, 1)


def test_with_error_feedback_a_single_other_code_is_found():
    tensors, block = make_model.random_tensors(1, "rolaq-feedback")
    spec = QuantizerSpec(feedback_block=block)
    tensors = {key: t.float() if t.is_floating_point() else t for key, t in tensors.items()}
    layer = make_layers(ShapedMethod("rolaq-feedback", tensors, spec), [0], "cpu")[0]
    latents, rope, slots = torch.randn(N, D), torch.randn(N, DR), torch.arange(N)
    rows = torch.zeros(N, spec.bytes_per_token(D, DR), dtype=torch.uint8)
    layer.store(latents, rope, slots, rows, torch.empty(0, D).bfloat16(), torch.full((N,), -1))
    artifact = SimpleNamespace(config=SimpleNamespace(feedback=True))
    pool = SimpleNamespace(artifact=artifact, spec=spec, rows=lambda _: rows, layer=lambda _: layer)
    assert tally(pool, slots, latents, rope) == Tally(writes=1, coordinates=N * D)
    rows[3, 7] ^= 1
    assert tally(pool, slots, latents, rope).wrong == 1
