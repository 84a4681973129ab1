"""How the calibrated methods under test were selected, as their artifacts tell it."""

from __future__ import annotations

from rolaq.eval.methods import SEEDED
from rolaq.eval.results import Row
from rolaq.eval.session import Session
from rolaq.quant.artifact import Artifact


def selection_rows(session: Session) -> list[Row]:
    """S and its parts of RoLaQ's artifacts: KL divided by OSCAR's, on validation text.

    ``r_short``, ``r_2k``, ``r_4k`` are the three validation lengths in ascending order; ``lengths``
    says which they were, since a model of short context has shorter ones.
    """
    found = [session.calibrated.get(name) for name in SEEDED]
    return [row for item in found if item and (row := _row(session.target.name, item.artifact))]


def _row(model: str, artifact: Artifact) -> Row | None:
    config, chosen = artifact.config, artifact.config.selection
    if "S" not in chosen:
        return None
    parts = {
        int(name[2:]): value
        for name, value in chosen.items()
        if name.startswith("r_") and name[2:].isdecimal()
    }
    lengths = sorted(parts)
    row = {"model": model, "method": config.method, "seed": config.seed, "S": chosen["S"]}
    row |= {name: parts[length] for name, length in zip(("r_short", "r_2k", "r_4k"), lengths, strict=False)}
    row |= {"lengths": "/".join(map(str, lengths)), "steps": chosen.get("steps"), "tokens": config.tokens}
    return {**row, "artifact": artifact.id}
