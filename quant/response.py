"""Linear response of the four-level quantizer under a Gaussian reference (paper §3.2, App. B.3).

For x ~ N(0, 1), `C(T) = E[x a_T(x)]`, so that `g a_T(x) = kappa x + eps` with `kappa = g C(T)` and
`E[x eps] = 0`. RoLaQ couples `g(T) = 1 / C(T)`, hence kappa = 1. All functions take a float or a
tensor of thresholds and return the same kind.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from rolaq.quant.spec import QuantizerSpec

Real = TypeVar("Real", float, torch.Tensor)

DEFAULT = QuantizerSpec()


def normal_density(x: Real) -> Real:
    """Standard normal density phi(x)."""
    exp = torch.exp if isinstance(x, torch.Tensor) else math.exp
    return exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def response(threshold: Real, spec: QuantizerSpec = DEFAULT) -> Real:
    """C(T) = 2 a_in (phi(0) - phi(T)) + 2 a_out phi(T) (Eq. 21)."""
    at_threshold = normal_density(threshold)
    return 2 * spec.a_in * (1 / math.sqrt(2 * math.pi) - at_threshold) + 2 * spec.a_out * at_threshold


def response_slope(threshold: Real, spec: QuantizerSpec = DEFAULT) -> Real:
    """dC/dT = -2 T phi(T) (a_out - a_in)."""
    return -2 * threshold * normal_density(threshold) * (spec.a_out - spec.a_in)


def gain(threshold: Real, spec: QuantizerSpec = DEFAULT) -> Real:
    """g(T) = 1 / C(T), the gain of unit response (Eq. 7)."""
    return 1 / response(threshold, spec)


def gain_slope(threshold: Real, spec: QuantizerSpec = DEFAULT) -> Real:
    """dg/dT = -C'(T) / C(T)^2."""
    return -response_slope(threshold, spec) / response(threshold, spec) ** 2


def mse_gain(threshold: Real, spec: QuantizerSpec = DEFAULT) -> Real:
    """Gain of least Gaussian reconstruction error, C(T) / E[a_T(x)^2] (App. B.3); kappa ~ .88 near T = 1."""
    erf = torch.erf if isinstance(threshold, torch.Tensor) else math.erf
    inside = erf(threshold / math.sqrt(2))
    return response(threshold, spec) / (spec.a_in**2 * inside + spec.a_out**2 * (1 - inside))
