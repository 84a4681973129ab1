"""What the parts of an evaluation share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rolaq.common.errors import RolaqError, lookup
from rolaq.common.text import Document, read_documents
from rolaq.eval.config import METHOD, DivergenceConfig, EvalConfig
from rolaq.eval.methods import Calibrated, Entry, Target
from rolaq.eval.passes import Pass
from rolaq.eval.results import Results, Row
from rolaq.quant.protection import Protection

Run = tuple[Entry, str]
"""A method and a budget."""


@dataclass
class Session:
    """Settings, the loaded model, calibrated artifacts by kind, results, and the methods to compare."""

    cfg: EvalConfig
    target: Target
    calibrated: dict[str, Calibrated]
    results: Results
    entries: list[Entry] = field(default_factory=list)

    @property
    def context(self) -> int:
        """Tokens that the model takes."""
        return self.cfg.model.context or int(self.target.model.config.max_position_embeddings)

    @property
    def divergence(self) -> DivergenceConfig:
        """How KL is measured, also where the suite has no such part of its own."""
        return self.cfg.suite.divergence or DivergenceConfig(passes=[])

    def runs(self, item: Pass) -> list[Run]:
        """The method and budget pairs of a pass."""
        budgets = [name for name in self.cfg.protect.budgets if item.budgets is None or name in item.budgets]
        entries = [entry for entry in self.entries if item.methods is None or entry.name in item.methods]
        return [(entry, budget) for budget in budgets for entry in entries]

    def protection(self, budget: str) -> Protection:
        """A budget with the reading of this run."""
        return Protection.parse(budget, self.cfg.protect.reading)

    def columns(self, run: Run) -> Row:
        """The columns that every row of a method and budget begins with."""
        entry, budget = run
        names = {"model": self.target.name, "method": entry.name, "seed": entry.seed}
        if (variant := self.variant(entry)) is not None:
            names["variant"] = variant
        return {**names, "budget": budget, "reading": self.cfg.protect.reading, "method_id": entry.id}

    def variant(self, entry: Entry) -> str | None:
        """What was ablated in the artifact of RoLaQ; None for the method itself, and for other methods."""
        kind = (self.cfg.calibration or METHOD).split("/")[0]
        return kind if entry.name == "rolaq" and kind != METHOD else None

    def documents(self, sources: Sequence[str], domains: Sequence[str] | None = None) -> list[Document]:
        """Text of all domains, or of those named.

        Raises:
            RolaqError: no such text.
        """
        documents = read_documents(list(sources), self.cfg.data.limit)
        if domains is None:
            return documents
        there = {item.domain: item.domain for item in documents}
        wanted = {lookup("domain", name, there) for name in domains}
        return [item for item in documents if item.domain in wanted]

    def check_lengths(self, lengths: Iterable[int], what: str) -> None:
        """Raise `RolaqError` when a length does not fit the model's context."""
        longest = max(lengths, default=0)
        if longest > self.context:
            raise RolaqError(f"{what}={longest} is longer than the {self.context} tokens of model.context")
