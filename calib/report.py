"""Figures of a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rolaq.common.figures import PALETTE, colour, figure, marker
from rolaq.quant.oscar import GAIN


def draw(
    folder: Path, history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], energy: Tensor
) -> list[Path]:
    """Draw every figure into `folder`; returns their paths. energy `[L, 2, d]`: cumulative K, V shares."""
    paths = [folder / f"{name}.png" for name in ("training", "thresholds", "energy", "attention_error")]
    draw_training(paths[0], history)
    draw_thresholds(paths[1], summary)
    draw_energy(paths[2], energy)
    draw_attention_error(paths[3], summary["attention_error"])
    return paths


def draw_training(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Loss and its parts by step, and S with its ratios by step."""
    steps = [entry for entry in history if entry["kind"] == "step"]
    validations = [entry for entry in history if entry["kind"] == "validation"]
    with figure(path, width=8, height=3.2, columns=2) as (left, right):
        for name in ("loss", "kl", "attention"):
            left.plot([e["step"] for e in steps], [e[name] for e in steps], label=name, linewidth=1)
        left.set(xlabel="step", ylabel="loss", yscale="log")
        left.legend()
        ratios = sorted((key for key in validations[0] if key.startswith("r_")), key=lambda key: int(key[2:]))
        at = [e["step"] for e in validations]
        right.plot(
            at, [e["S"] for e in validations], label="S", color=colour("rolaq"), marker=marker("rolaq")
        )
        for name, shade in zip(ratios, (0.75, 0.55, 0.35, 0.15), strict=False):
            right.plot(at, [e[name] for e in validations], "--", color=str(shade), linewidth=1, label=name)
        right.set(xlabel="step", ylabel="KL relative to OSCAR")
        right.legend()


def draw_thresholds(path: Path, summary: Mapping[str, Any]) -> None:
    """T and g by layer, OSCAR's values dashed (Figure 8)."""
    settings = summary["settings"]
    panels = (("threshold", settings["quant.spec.threshold_init"], "T"), ("gain", GAIN, "g"))
    with figure(path, width=8, height=3, columns=2) as axes:
        for axis, (name, start, symbol) in zip(axes, panels, strict=True):
            axis.plot(summary[name], marker=marker("rolaq"), color=colour("rolaq"))
            axis.axhline(start, color=colour("oscar"), linestyle="--", label="OSCAR")
            axis.set(xlabel="layer", ylabel=f"{name} {symbol}")
            axis.legend()


def draw_energy(path: Path, energy: Tensor) -> None:
    """Cumulative projection energy by rank, mean and deviation over layers (Figure 7)."""
    dim = energy.shape[-1]
    share = np.arange(1, dim + 1) / dim
    with figure(path, width=4.6, height=3.6) as axis:
        for index, (name, line) in enumerate((("keys", "-"), ("values", "--"))):
            curves = energy[:, index].cpu().numpy()
            mean, deviation = curves.mean(0), curves.std(0)
            axis.plot(
                share, mean, line, color=PALETTE[index], label=f"{name}, half: {mean[dim // 2 - 1]:.0%}"
            )
            axis.fill_between(
                share, mean - deviation, mean + deviation, color=PALETTE[index], alpha=0.15, linewidth=0
            )
        axis.plot([0, 1], [0, 1], color=PALETTE[-1], linestyle=":", label="isotropic")
        axis.axvline(0.5, color=PALETTE[-1], linewidth=0.8)
        axis.set(xlabel="share of joint directions", ylabel="cumulative energy", xlim=(0, 1), ylim=(0, 1.01))
        axis.legend()


def draw_attention_error(path: Path, errors: Mapping[str, Sequence[float]]) -> None:
    """Relative attention-output error of each layer, one curve per method."""
    with figure(path, width=5, height=3.2) as axis:
        for name, values in errors.items():
            axis.plot(values, marker=marker(name), color=colour(name), label=name)
        axis.set(xlabel="layer", ylabel="relative output error", ylim=(0, None))
        axis.legend()
