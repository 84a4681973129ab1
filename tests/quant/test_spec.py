"""Bytes per token, layout and refusals of the spec."""

import pytest
from pydantic import ValidationError

from rolaq.common.errors import RolaqError
from rolaq.quant.spec import QuantizerSpec, bf16_bytes_per_token

SHAPES = [("DeepSeek-V2-Lite, Moonlight", 512, 64, 1152, 288), ("MiniCPM3, testbed", 256, 32, 576, 144)]


@pytest.mark.parametrize(("_", "latent", "rope", "bf16", "packed"), SHAPES)
def test_bytes_per_token(_, latent, rope, bf16, packed):
    assert bf16_bytes_per_token(latent, rope) == bf16
    assert QuantizerSpec().bytes_per_token(latent, rope) == packed


def test_half_precision_statistics_take_272_bytes():
    assert QuantizerSpec(stats_dtype="float16").bytes_per_token(512, 64) == 272


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 32)])
def test_parts_are_contiguous_and_aligned(latent, rope):
    row = QuantizerSpec().row(latent, rope)
    assert row.codes.offset == 0 and row.rope.offset == row.codes.size
    assert row.params.offset == row.rope.offset + row.rope.size
    assert row.size == row.params.offset + row.params.size
    assert row.rope.offset % 32 == 0 and row.params.offset % 32 == 0


@pytest.mark.parametrize("change", [{"bits": 3}, {"unknown": 1}, {"group_size": 12}, {"threshold_init": 2.0}])
def test_bad_specs_are_refused(change):
    with pytest.raises(ValidationError):
        QuantizerSpec(**change)


def test_frozen():
    with pytest.raises(ValidationError):
        QuantizerSpec().bits = 2


@pytest.mark.parametrize("latent", [0, 100, 192])
def test_group_must_divide_the_latent(latent):
    with pytest.raises(RolaqError, match=f"{latent}.*layer 3.*128"):
        QuantizerSpec().check(latent, "layer 3")


@pytest.mark.parametrize("threshold", [0.49, 1.26, -1.0, float("nan")])
def test_threshold_bounds(threshold):
    with pytest.raises(RolaqError, match=r"layer 3.*\[0.5, 1.25\]"):
        QuantizerSpec().check_threshold(threshold, "layer 3")


def test_oscars_constants():
    spec = QuantizerSpec()
    assert (spec.a_out, spec.threshold_init) == (1.5095585584640503, 0.9810652732849121)
    assert spec.a_in * 3 == pytest.approx(spec.a_out, rel=1e-15)
    assert (spec.bits, spec.group_size, spec.threshold_min, spec.threshold_max) == (2, 128, 0.5, 1.25)
