"""OSCAR's gain alone (paper, Figure 2b): its rotation and threshold stay, one gain for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from rolaq.common.progress import Progress
from rolaq.common.text import crop
from rolaq.eval.config import GainConfig
from rolaq.eval.divergence import measure
from rolaq.eval.methods import code, digest, tensors_id
from rolaq.eval.results import Results, Row
from rolaq.eval.session import Session
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.oscar import GAIN
from rolaq.quant.protection import Protection
from rolaq.quant.response import response
from rolaq.quant.spec import QuantizerSpec

LENGTH = 8192
"""Tokens of the paper's documents."""


def gains(cfg: GainConfig) -> list[float]:
    """The gains to measure; OSCAR's own is always among them, to normalise by."""
    return sorted({*cfg.gains, GAIN})


def run(session: Session) -> float:
    """The gain that is best on validation text; measures and records the sweep unless it is there.

    Nothing is protected. ``kl`` is the mean over documents in nats, ``relative`` that divided by the
    KL at OSCAR's gain, ``kappa`` the linear response at T0.
    """
    cfg, results = session.cfg.suite.gain_sweep or GainConfig(), session.results
    length = cfg.length or min(LENGTH, session.context)
    session.check_lengths([length], "suite.gain_sweep.length")
    texts = crop(
        session.documents(session.cfg.data.val, cfg.domains),
        session.target.tokenizer,
        length,
        cfg.documents,
    )
    ids = torch.cat(list(texts.values()))
    oscar = session.calibrated["oscar"].artifact.method().to(session.target.model.device)
    skip = length - cfg.last if cfg.last else session.divergence.skip
    mark = _fingerprint(session, oscar, ids, skip)
    base = {"model": session.target.name, "length": length, "fingerprint": mark}
    wanted = [{**base, "gain": gain} for gain in gains(cfg)]
    if not all(results.find("gain_sweep", row) for row in wanted):
        for row, kl in zip(wanted, _sweep(session, oscar, ids, skip), strict=True):
            results.add("gain_sweep", {**row, "kl": kl, "documents": len(ids), "domains": len(texts)})
        _normalise(results, wanted)
        results.save()
    rows = [results.find("gain_sweep", row) or {} for row in wanted]
    return min(rows, key=lambda row: row["kl"])["gain"]


def _sweep(session: Session, oscar: FourLevelMethod | ShapedMethod, ids: Tensor, skip: int) -> list[float]:
    values = gains(session.cfg.suite.gain_sweep or GainConfig())
    runs = [(oscar.with_gain(gain), Protection(0, 0)) for gain in values]
    settings = session.divergence.model_copy(update={"skip": skip})
    with Progress(total=ids.numel() * (1 + len(runs)), label="gain sweep, tokens") as bar:
        return [scores.mean_kl for scores in measure(session.target.model, ids, runs, settings, bar.update)]


def _normalise(results: Results, wanted: list[Row]) -> None:
    rows = [results.find("gain_sweep", row) or {} for row in wanted]
    reference = next(row["kl"] for row in rows if row["gain"] == GAIN)
    for row in rows:
        row["kappa"] = row["gain"] * response(QuantizerSpec().threshold_init)
        row["relative"] = row["kl"] / reference


def _fingerprint(session: Session, oscar: FourLevelMethod | ShapedMethod, ids: Tensor, skip: int) -> str:
    model = (session.target.identity.weights, session.target.model.dtype)
    return digest(*model, code(), skip, tensors_id(oscar), ids.numpy().tobytes())
