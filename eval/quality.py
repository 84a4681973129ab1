"""KL and perplexity of every method, budget, domain and length that a suite asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rolaq.common.progress import Progress
from rolaq.common.text import check_disjoint, crop, fingerprint
from rolaq.eval.config import DivergencePass
from rolaq.eval.divergence import Scores, measure
from rolaq.eval.methods import digest
from rolaq.eval.results import Row
from rolaq.eval.session import Run, Session


@dataclass(frozen=True)
class Unit:
    """Sequences ``ids [n, length]`` of one domain, and the runs that still lack their row."""

    domain: str
    ids: Tensor
    pending: list[tuple[Run, Row]]

    @property
    def tokens(self) -> int:
        """Tokens of all forward passes, the teacher's included."""
        return self.ids.numel() * (1 + sum(not entry.method.exact for (entry, _), _ in self.pending))


def evaluate(session: Session) -> None:
    """Measure what is not in the results yet; they are saved after every domain and length."""
    cfg = session.cfg.suite.divergence
    if cfg is None:
        return
    session.check_lengths((n for item in cfg.passes for n in item.lengths), "suite.divergence lengths")
    units = list(_units(session, cfg.passes))
    if not units:
        return
    with Progress(total=sum(unit.tokens for unit in units), label="KL, tokens") as bar:
        for unit in units:
            bar.postfix(domain=unit.domain, length=unit.ids.shape[1])
            _measure(session, unit, bar)
            session.results.save()


def _units(session: Session, passes: list[DivergencePass]) -> Iterator[Unit]:
    documents = session.documents(session.cfg.data.test)
    check_disjoint(validation=session.documents(session.cfg.data.val), test=documents)
    session.results.meta["test_text"] = fingerprint(documents)
    text = digest(fingerprint(documents), session.divergence.skip)
    session.results.forget_text(session.target.name, text)
    for item in passes:
        chosen = session.documents(session.cfg.data.test, item.domains) if item.domains else documents
        for length in item.lengths:
            for domain, ids in crop(chosen, session.target.tokenizer, length, item.documents).items():
                rows = [(run, _row(session, run, domain, ids, text)) for run in session.runs(item)]
                pending = [(run, row) for run, row in rows if not session.results.find("quality", row)]
                if pending:
                    yield Unit(domain, ids, pending)


def _row(session: Session, run: Run, domain: str, ids: Tensor, text: str) -> Row:
    """The row of a run without its numbers; ``text`` marks rows that may be averaged together."""
    cfg, columns = session.divergence, session.columns(run)
    mark = digest(*columns.values(), cfg.skip, cfg.prefill, domain, ids.numpy().tobytes())
    return {**columns, "domain": domain, "length": ids.shape[1], "text": text, "fingerprint": mark}


def _measure(session: Session, unit: Unit, bar: Progress[Any]) -> None:
    runs = [(entry.method, session.protection(budget)) for (entry, budget), _ in unit.pending]
    found = measure(session.target.model, unit.ids, runs, session.divergence, bar.update)
    for ((entry, budget), row), scores in zip(unit.pending, found, strict=True):
        protection = session.protection(budget)
        exact = (
            0
            if entry.method.exact
            else 2 * session.target.identity.latent_dim * (protection.sink + protection.recent)
        )
        stored = {"bytes_per_token": entry.bytes_per_token, "window_bytes": exact}
        session.results.add("quality", {**row, **numbers(scores), **stored})


def numbers(scores: Scores) -> Row:
    """KL (nats), its standard error over documents, perplexity, and how much text they come from."""
    per_document = scores.by_document
    n = len(per_document)
    spread = math.sqrt(sum((x - scores.mean_kl) ** 2 for x in per_document) / (n - 1) / n) if n > 1 else None
    return {
        "kl": scores.mean_kl,
        "kl_stderr": spread,
        "ppl": scores.perplexity,
        "documents": n,
        "positions": scores.kl_positions,
    }
