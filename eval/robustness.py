"""`python -m rolaq.eval.robustness ARTIFACT…`: KL on inputs that no calibration saw.

Random tokens, one token again and again, a short cycle, program code, and sequences several times as
long as the calibration's, each against rounding to nearest without calibration (`hadamard`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolaq import quant
from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError, main
from rolaq.common.files import markdown_table, write_json
from rolaq.common.models import load_model
from rolaq.common.text import read_documents
from rolaq.eval.config import DivergenceConfig
from rolaq.eval.divergence import measure
from rolaq.eval.methods import FROM_WEIGHTS, Target
from rolaq.eval.results import Row, stamp
from rolaq.quant.artifact import Artifact
from rolaq.quant.geometry import energies
from rolaq.quant.methods.base import Method, build_method
from rolaq.quant.protection import Protection

CYCLE = 16
REFERENCE = "hadamard"


def inputs(
    target: Target, length: int, rows: int, text: Sequence[str], long: int | None = None
) -> dict[str, Tensor]:
    """Token ids `[rows, length]` by name; `long` tokens of `text` (files) as one more sequence, if given.

    Random ids leave out nothing but the end-of-text token.
    """
    vocabulary = target.model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        ids = torch.randint(0, vocabulary, (rows, count), generator=draw)
        return torch.where(ids == target.tokenizer.eos_token_id, (ids + 1) % vocabulary, ids)

    repeats = -(-length // CYCLE)
    found = {
        "random tokens": random(length),
        "one token": random(1).expand(rows, length).contiguous(),
        f"cycle of {CYCLE}": random(CYCLE).repeat(1, repeats)[:, :length],
        "code": _windows(_tokens(target, _sources()), length, rows),
    }
    if long:
        prose = "\n\n".join(document.text for document in read_documents(list(text)))
        found[f"{long} tokens"] = _windows(_tokens(target, prose[: 12 * long]), long, 1)
    return found


def _sources() -> str:
    """The program code of this package itself."""
    return "\n".join(path.read_text("utf8") for path in sorted(Path(quant.__path__[0]).rglob("*.py")))


def _tokens(target: Target, text: str) -> Tensor:
    return torch.tensor(target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _windows(ids: Tensor, length: int, rows: int) -> Tensor:
    """The first `rows` windows of a text; raises `RolaqError` when it has not one."""
    rows = min(rows, len(ids) // length)
    if not rows:
        raise RolaqError(
            f"too little text: {length} tokens needed, {len(ids)} available; name more with --text"
        )
    return ids[: rows * length].view(rows, length)


def methods(target: Target, artifacts: Sequence[str]) -> dict[str, tuple[Method, int | None]]:
    """The reference, those from weights alone, and every artifact's, with its seed; labels stay apart."""
    size: dict[str, Any] = {"d": target.identity.latent_dim, "layers": target.identity.layers}
    found: dict[str, tuple[Method, int | None]] = {REFERENCE: (build_method(REFERENCE, **size), None)}
    for name in FROM_WEIGHTS:
        found[name] = build_method(name, energies=energies(target.layers), **size), None
    for folder in artifacts:
        artifact = Artifact.load(folder, target.identity)
        found[f"{artifact.config.method} {folder}"] = artifact.method(), artifact.config.seed
    return found


def rows_of(
    target: Target,
    compared: Mapping[str, tuple[Any, int | None]],
    texts: Mapping[str, Tensor],
    progress: Callable[[str], object] = lambda name: None,
) -> list[Row]:
    """KL in nats of each method on each input, and relative to `REFERENCE`'s."""
    found = []
    device = target.model.device
    runs = [(method.to(device), Protection(0, 0)) for method, _ in compared.values()]
    for name, ids in texts.items():
        progress(name)
        scores = measure(target.model, ids, runs, DivergenceConfig(passes=[], batch_tokens=ids.shape[1]))
        base = next(s.mean_kl for s, label in zip(scores, compared, strict=True) if label == REFERENCE)
        for (method, seed), score in zip(compared.values(), scores, strict=True):
            about = {"model": target.name, "method": method.name, "seed": seed, "input": name}
            numbers = {"length": ids.shape[1], "sequences": len(ids), "kl": score.mean_kl}
            found.append({**about, **numbers, "relative": score.mean_kl / base})
    return found


@main
def command() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="*", help="artifact folders to compare")
    parser.add_argument("--model", default="pkg://rolaq.testbed/tiny", help="model folder or id")
    parser.add_argument("--name", default="tiny")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--long", type=int, help="also one sequence of so many tokens")
    parser.add_argument("--text", nargs="*", default=["pkg://rolaq.testbed/text/test.jsonl"])
    parser.add_argument("--json", help="also write the rows to this file")
    given = parser.parse_args()
    cfg = ModelConfig(name=given.name, path=given.model)
    target = Target.of(cfg, *load_model(cfg))
    texts = inputs(target, given.length, given.sequences, given.text, given.long)
    rows = rows_of(target, methods(target, given.artifacts), texts, print)
    print(markdown_table(rows, list(rows[0])))
    if given.json:
        print(f"wrote {write_json(given.json, [{**row, **stamp()} for row in rows])}")


if __name__ == "__main__":
    command()
