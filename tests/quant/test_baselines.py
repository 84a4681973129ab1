"""RTN and QuaRot against NumPy, and building methods by name."""

import numpy as np
import pytest
import reference
import torch

from rolaq.common.errors import RolaqError
from rolaq.quant.methods import available, build_method
from rolaq.quant.minmax import affine, rtn
from rolaq.quant.spec import QuantizerSpec


def numpy_rtn(x, group=128):
    """RTN in float32, operation by operation, so that codes can be compared exactly."""
    x = np.asarray(x, np.float32).reshape(*np.shape(x)[:-1], np.shape(x)[-1] // group, group)
    low = x.min(-1, keepdims=True)
    step = (x.max(-1, keepdims=True) - low) / np.float32(3)
    codes = np.zeros_like(x)
    np.divide(x - low, step, out=codes, where=step > 0)
    return (low + step * np.clip(np.rint(codes), 0, 3)).reshape(*x.shape[:-2], x.shape[-2] * group)


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 128), (2, 5, 256), (1, 1, 512), (0, 256), (3, 0, 128)])
@pytest.mark.parametrize("group", [128, 64, 8])
def test_rtn_is_numpys_to_the_last_bit(shape, group):
    x = sample(*shape) * 3 + 1
    assert np.array_equal(rtn(torch.from_numpy(x), group).numpy(), numpy_rtn(x, group))


@pytest.mark.parametrize("value", [0.0, 1.3, -2e4, 1e-42])
def test_constant_groups_are_exact(value):
    x = torch.full((2, 256), value)
    assert torch.equal(rtn(x, 128), x)


def test_half_steps_round_to_even():
    x = torch.tensor([0.0, 3.0, 0.5, 1.5, 2.5, 1.0, 2.0, 0.4])
    assert rtn(x, 8).tolist() == [0.0, 3.0, 0.0, 2.0, 2.0, 1.0, 2.0, 0.0]


def test_extremes_are_kept_and_the_error_is_at_most_half_a_step():
    x = torch.from_numpy(sample(50, 128, seed=1))
    step = (x.amax(-1) - x.amin(-1)) / 3
    restored = rtn(x, 128)
    assert torch.allclose(restored.aminmax(dim=-1)[0], x.amin(-1))
    assert ((restored - x).abs().amax(-1) <= step / 2 * (1 + 1e-5)).all()


def test_step_floor():
    x = torch.tensor([[0.0, 1e-9]])
    assert affine(x, x[:, :1], x[:, 1:], floor=1e-8).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quarot_is_rtn_between_block_hadamards(dtype):
    x = torch.from_numpy(sample(2, 7, 256)).to(dtype)
    blocks = np.kron(np.eye(2), reference.sylvester(128))
    rotated = x.double().numpy() @ blocks
    expected = numpy_rtn(rotated).astype(np.float64) @ blocks.T
    restored = build_method("quarot", d=256, layers=1).reconstruct(x, 0)
    assert restored.dtype == dtype and restored.shape == x.shape
    error = np.abs(restored.double().numpy() - expected)
    # a coordinate on a rounding boundary may take the other code in fp32; its token then differs
    assert (error.max(-1) < 3 * torch.finfo(dtype).eps + 1e-5).mean() > 0.9
    assert error.max() < 0.5


def test_methods_by_name():
    nearest = {"bf16", "rtn", "quarot", "kvarn", "hadamard", "oscar", "rolaq"}
    shaped = {"rolaq-feedback", "hadamard-feedback", "weights-feedback"}
    assert nearest | shaped == set(available())
    x = torch.from_numpy(sample(1, 3, 256))
    exact = build_method("bf16", d=256, layers=2)
    assert exact.exact and exact.reconstruct(x, 1) is x and exact.to("cpu") is exact
    assert torch.equal(build_method("rtn", d=256, layers=2).reconstruct(x, 1), rtn(x, 128))
    fine = build_method("rtn", d=256, layers=2, spec=QuantizerSpec(group_size=32))
    assert torch.equal(fine.reconstruct(x, 1), rtn(x, 32))
    assert build_method("hadamard", d=256, layers=2).reconstruct(x, 1).shape == x.shape


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rnt", {}, "Unknown method 'rnt'. Did you mean: rtn"),
        ("rtn", {"d": 200}, "200 .* not a multiple of the group size 128"),
        ("kvarn", {"d": 384}, "power of two"),
        ("rtn", {"clip": 1}, "method rtn: .*'clip'"),
        ("kvarn", {"klip": 1}, "method kvarn: .*'klip'"),
        ("kvarn", {"tile": 1}, "tile=1"),
        ("oscar", {}, "make calibrate"),
    ],
)
def test_errors_name_the_problem(name, options, message):
    with pytest.raises(RolaqError, match=message) as caught:
        build_method(name, **{"d": 256, "layers": 2, **options})
    assert "\n" not in str(caught.value)
