"""How much response a calibrated quantizer wants, by context length (paper, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rolaq.common.progress import Progress
from rolaq.common.text import crop
from rolaq.eval.divergence import measure
from rolaq.eval.methods import code, digest, tensors_id
from rolaq.eval.results import Results, Row
from rolaq.eval.session import Session
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.protection import Protection
from rolaq.quant.response import response


def with_response(method: FourLevelMethod, kappa: float) -> FourLevelMethod:
    """The same rotation and thresholds with the gain that makes every layer's linear response ``kappa`` (Eq. 6)."""
    gain = torch.full_like(method.threshold, kappa) / response(method.threshold)
    return FourLevelMethod(method.name, method.rotation, method.threshold, gain, method.spec)


def run(session: Session) -> None:
    """Measure what is not in the results yet: KL at each response, also divided by that at response 1.

    Nothing is protected; text and positions are those of the gain sweep.
    """
    cfg = session.cfg.suite.kappa_sweep
    entry = next((entry for entry in session.entries if entry.name == "rolaq"), None)
    if cfg is None or entry is None:
        return
    lengths = cfg.lengths_for(session.context)
    session.check_lengths(lengths, "suite.kappa_sweep.lengths")
    documents = session.documents(session.cfg.data.val, cfg.domains)
    method = session.calibrated["rolaq"].artifact.method().to(session.target.model.device)
    assert isinstance(method, FourLevelMethod)
    for length in lengths:
        ids = torch.cat(list(crop(documents, session.target.tokenizer, length, cfg.documents).values()))
        about = {"model": session.target.name, "variant": session.variant(entry), "seed": entry.seed}
        rows = [{**about, "length": length, "kappa": kappa} for kappa in sorted({*cfg.kappas, 1.0})]
        _length(session, method, ids, rows)


def _length(session: Session, method: FourLevelMethod, ids: Tensor, rows: Sequence[Row]) -> None:
    results, skip = session.results, session.divergence.skip
    model = (session.target.identity.weights, session.target.model.dtype)
    mark = digest(*model, code(), skip, tensors_id(method), ids.numpy().tobytes())
    wanted = [{**row, "fingerprint": mark} for row in rows]
    if all(results.find("kappa_sweep", row) for row in wanted):
        return
    runs = [(with_response(method, row["kappa"]), Protection(0, 0)) for row in rows]
    with Progress(total=ids.numel() * (1 + len(runs)), label=f"response at {ids.shape[1]}, tokens") as bar:
        found = measure(session.target.model, ids, runs, session.divergence, bar.update)
    _record(results, wanted, [scores.mean_kl for scores in found], len(ids))


def _record(results: Results, rows: Sequence[Row], kls: Sequence[float], documents: int) -> None:
    reference = next(kl for row, kl in zip(rows, kls, strict=True) if row["kappa"] == 1.0)
    for row, kl in zip(rows, kls, strict=True):
        results.add("kappa_sweep", {**row, "kl": kl, "relative": kl / reference, "documents": documents})
    results.save()
