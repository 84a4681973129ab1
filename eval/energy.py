"""How much of each projection's energy the leading joint directions hold (paper, Figures 2a and 7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rolaq.eval.results import Row
from rolaq.eval.session import Session
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.geometry import cumulative_energy, energy, projections


def profiles(layers: Sequence[MLALayer]) -> Tensor:
    """``F_K, F_V`` of every layer, ``[L, 2, d]`` fp64: energy in the leading r directions (Eq. 15)."""
    found = [cumulative_energy(*energy(*projections(layer))) for layer in layers]
    return torch.stack([torch.stack(pair) for pair in found]).cpu()


def run(session: Session) -> None:
    """Record, per layer, the percentage of key and value energy in the leading half of the spectrum.

    The full profiles, mean and sample standard deviation over layers, go to ``meta`` for Figure 7.
    """
    if not session.cfg.suite.energy:
        return
    curves = profiles(session.target.layers)
    half = 100 * curves[:, :, curves.shape[-1] // 2 - 1]
    for layer, (key, value) in enumerate(half.tolist()):
        row = {"model": session.target.name, "layer": layer, "key_percent": key, "value_percent": value}
        session.results.add("energy", {**row, "fingerprint": session.target.identity.weights})
    spread = curves.std(0) if len(curves) > 1 else torch.zeros_like(curves[0])
    session.results.meta["energy"] = {
        name: {"mean": _rounded(mean), "std": _rounded(std)}
        for name, mean, std in zip(("key", "value"), curves.mean(0), spread, strict=True)
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def summary(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Mean and sample standard deviation over layers, in percent, of keys and values (Figure 2a)."""
    result = {}
    for name in ("key", "value"):
        values = torch.tensor([row[f"{name}_percent"] for row in rows], dtype=torch.float64)
        result[name] = (values.mean().item(), values.std().item() if len(values) > 1 else 0.0)
    return result
