"""C(T), g(T) and their slopes against the paper's values, quadrature and finite differences."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from rolaq.quant import response as r
from rolaq.quant.spec import QuantizerSpec

SPEC = QuantizerSpec()
A_OUT, A_IN = 1.5095585584640503, 1.5095585584640503 / 3


@pytest.mark.parametrize(
    ("function", "threshold", "expected", "places"),
    [
        (r.response, SPEC.threshold_init, 0.89773, 5),
        (r.gain, SPEC.threshold_init, 1.11392, 5),
        (r.gain, 0.5, 0.9008, 4),
        (r.gain, 1.25, 1.3002, 4),
    ],
)
def test_check_values(function, threshold, expected, places):
    assert round(function(threshold), places) == expected


def test_oscar_gain_and_the_sweep_are_these_kappas():
    at_init = r.response(SPEC.threshold_init)
    assert round(1.16 * at_init, 4) == 1.0414
    sweep = [1.025, 1.069, 1.114, 1.160, 1.203, 1.248]
    assert [round(g * at_init, 2) for g in sweep] == [0.92, 0.96, 1.00, 1.04, 1.08, 1.12]
    assert round(1.160 * at_init, 3) == 1.041


@pytest.mark.parametrize("threshold", [0.5, 0.75, SPEC.threshold_init, 1.1, 1.25])
def test_against_quadrature(threshold):
    inner = quad(lambda x: x * norm.pdf(x), 0, threshold)[0]
    outer = quad(lambda x: x * norm.pdf(x), threshold, np.inf)[0]
    expected = 2 * A_IN * inner + 2 * A_OUT * outer
    energy = A_IN**2 * (2 * norm.cdf(threshold) - 1) + A_OUT**2 * 2 * norm.sf(threshold)
    assert r.response(threshold) == pytest.approx(expected, rel=1e-9)
    assert r.mse_gain(threshold) == pytest.approx(expected / energy, rel=1e-9)


@pytest.mark.parametrize("threshold", [0.5, 0.98, 1.25])
@pytest.mark.parametrize(("value", "slope"), [(r.response, r.response_slope), (r.gain, r.gain_slope)])
def test_slopes_against_finite_differences(value, slope, threshold):
    step = 1e-5
    numeric = (value(threshold + step) - value(threshold - step)) / (2 * step)
    assert slope(threshold) == pytest.approx(numeric, rel=1e-7)


def test_mse_gain_attenuates():
    assert r.mse_gain(1.0) * r.response(1.0) == pytest.approx(0.88, abs=0.005)


def test_tensors_and_floats_agree():
    threshold = torch.tensor([0.5, 0.9, 1.25], dtype=torch.float64)
    for function in (r.response, r.response_slope, r.gain, r.gain_slope, r.mse_gain):
        assert function(threshold).tolist() == pytest.approx(
            [function(float(t)) for t in threshold], rel=1e-12
        )


def test_unit_response_on_gaussian_samples():
    """g(T) a_T(x) regressed on x has slope one, and the residual is uncorrelated with x."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(2_000_000)
    for threshold in (0.6, 0.98, 1.2):
        levels = np.where(np.abs(x) < threshold, A_IN, A_OUT) * np.sign(x)
        assert r.gain(threshold) * np.mean(x * levels) == pytest.approx(1, abs=3e-3)


def test_normal_density():
    assert r.normal_density(0.7) == pytest.approx(math.exp(-0.245) / math.sqrt(2 * math.pi))
