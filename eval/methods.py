"""Which methods an evaluation compares, and where their calibrated tensors come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rolaq import quant
from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.common.files import find
from rolaq.quant.artifact import CONFIG_NAME, Artifact
from rolaq.quant.geometry import energies
from rolaq.quant.identity import model_identity, parameters_fingerprint
from rolaq.quant.metadata import ModelIdentity
from rolaq.quant.spec import QuantizerSpec, bf16_bytes_per_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rolaq.quant.adapters.layers import MLALayer
    from rolaq.quant.methods.base import Method

METHODS = {
    "bf16": "the model as it is",
    "rtn": "min-max rounding of the latent",
    "quarot": "block Hadamard, then min-max rounding",
    "kvarn": "Hadamard and variance normalisation over tiles of tokens",
    "hadamard": "block Hadamard and the four-level quantizer at unit response",
    "oscar": "OSCAR: covariance rotation, T0, gain 1.16",
    "oscar-best-gain": "OSCAR with the single gain that is best on validation text",
    "rolaq": "RoLaQ: learned rotation and thresholds",
    "hadamard-feedback": "hadamard with error feedback from the weights alone",
    "weights-feedback": "error feedback and its basis from the weights alone",
    "rolaq-feedback": "error feedback from data, learned write matrix and thresholds",
}
CALIBRATED = {
    "oscar": "oscar",
    "oscar-best-gain": "oscar",
    "rolaq": "rolaq",
    "rolaq-feedback": "rolaq-feedback",
}
SEEDED = ("rolaq", "rolaq-feedback")
FROM_WEIGHTS = ("hadamard-feedback", "weights-feedback")
PLAIN_TENSORS = ("rotation", "threshold", "gain")
PAPER = tuple(name for name in METHODS if not name.endswith("-feedback"))
"""The methods of the paper and its references, which an evaluation compares by default."""


@dataclass(frozen=True)
class Target:
    """A loaded model with its MLA layers."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: Sequence[MLALayer]
    identity: ModelIdentity

    @classmethod
    def of(cls, cfg: ModelConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Target:
        """Find the model's MLA layers.

        Raises:
            RolaqError: it has none.
        """
        from rolaq.quant.adapters.layers import find_mla_layers

        layers = find_mla_layers(model)
        return cls(
            cfg.name, model, tokenizer, layers, model_identity(layers, model.config, cfg.name, cfg.revision)
        )


@dataclass(frozen=True)
class Calibrated:
    """An artifact and the folder it was read from."""

    artifact: Artifact
    folder: str


@dataclass(frozen=True)
class Entry:
    """A method in the comparison.

    ``id`` changes whenever its result could: with the model's weights, the method's tensors.
    ``bytes_per_token`` is the row of one unprotected token in one layer.
    """

    name: str
    method: Method
    seed: int | None
    bytes_per_token: int
    id: str


def load_artifacts(
    names: Sequence[str],
    target: Target,
    cfg: ModelConfig,
    artifact: str = "auto",
    artifacts: str = "artifacts",
) -> dict[str, Calibrated]:
    """The artifacts that ``names`` need, by kind (``oscar``, ``rolaq``, …), checked against the model.

    ``auto`` takes ``<artifacts>/<model>/<kind>``, or else the one that is shipped with the model.
    Otherwise ``artifact`` is a folder that holds the kinds, or one of them.

    Raises:
        RolaqError: an artifact is missing, damaged, or belongs to another model.
    """
    kinds = dict.fromkeys(CALIBRATED[name] for name in names if name in CALIBRATED)
    loaded = {}
    for kind in kinds:
        folder = _locate(kind, cfg, artifact, artifacts)
        loaded[kind] = Calibrated(Artifact.load(folder, target.identity), str(folder))
        if loaded[kind].artifact.config.method != kind:
            raise RolaqError(
                f"{folder} holds a {loaded[kind].artifact.config.method} artifact, {kind} is needed there"
            )
    return loaded


def _locate(kind: str, cfg: ModelConfig, artifact: str, artifacts: str) -> Path:
    """The first folder that holds an artifact of this kind."""
    given = Path(find(artifact))
    places = [Path(artifacts) / cfg.name / kind]
    if artifact != "auto":
        # one artifact given: its siblings are the other kinds; the longest kind in its name is its own
        named = max((name for name in CALIBRATED.values() if name in given.name), key=len, default="")
        places = [given] if kind == named else [given / kind, given.parent / kind]
    if cfg.artifact and (artifact == "auto" or kind == "oscar"):
        places.append(Path(find(cfg.artifact)) / kind)
    for place in places:
        if (place / CONFIG_NAME).is_file():
            return place
    looked = ", ".join(map(str, places))
    raise RolaqError(
        f"no {kind} artifact for {cfg.name} in {looked}: run `make calibrate MODEL={cfg.name}` first"
    )


def build(
    names: Sequence[str], target: Target, calibrated: dict[str, Calibrated], best_gain: float | None = None
) -> list[Entry]:
    """The methods named, ready to run on the model's device, in the order of `METHODS`."""
    return [_entry(name, target, calibrated, best_gain) for name in METHODS if name in names]


def _entry(name: str, target: Target, calibrated: dict[str, Calibrated], best_gain: float | None) -> Entry:
    source = calibrated.get(CALIBRATED.get(name, ""))
    method = _method(name, target, source, best_gain).to(target.model.device)
    spec = getattr(method, "spec", QuantizerSpec())
    seed = source.artifact.config.seed if source and name in SEEDED else None
    about = (
        target.identity.weights,
        parameters_fingerprint(target.model),
        str(target.model.dtype),
        name,
        spec.model_dump_json(),
        tensors_id(method),
        code(),
    )
    return Entry(name, method, seed, _bytes(name, spec, target.identity), digest(*about))


def _method(name: str, target: Target, source: Calibrated | None, best_gain: float | None) -> Any:
    from rolaq.quant.methods.base import build_method

    if name == "oscar-best-gain":
        if source is None or best_gain is None:
            raise RolaqError(
                "oscar-best-gain needs the gain sweep: set suite.gain_sweep, or leave it out of methods"
            )
        return source.artifact.method().with_gain(best_gain, name)
    if source is not None:
        return source.artifact.method()
    model, options = target.identity, dict[str, Any]()
    if name in FROM_WEIGHTS:
        options["energies"] = energies(target.layers)
    return build_method(name, d=model.latent_dim, layers=model.layers, **options)


def _bytes(name: str, spec: QuantizerSpec, model: ModelIdentity) -> int:
    """Bytes of a row; KVarN keeps a further fp32 scale per token (its channel scales fold into the step)."""
    if name == "bf16":
        return bf16_bytes_per_token(model.latent_dim, model.rope_dim)
    return spec.bytes_per_token(model.latent_dim, model.rope_dim) + (4 if name == "kvarn" else 0)


def tensors_id(method: Any) -> str:
    """SHA-256 of a method's tensors; empty when it has none."""
    found = [getattr(method, key, None) for key in ("rotation", "threshold", "gain")]
    found += [tensor for key, tensor in getattr(method, "tensors", {}).items() if key not in PLAIN_TENSORS]
    data = [item.detach().float().cpu().contiguous() for item in found if isinstance(item, torch.Tensor)]
    return hashlib.sha256(b"".join(item.numpy().tobytes() for item in data)).hexdigest() if data else ""


@cache
def code() -> str:
    """Digest of the sources of `quant`, which define every method's result."""
    return digest(*(path.read_text("utf8") for path in sorted(Path(quant.__path__[0]).rglob("*.py"))))


def digest(*parts: Any) -> str:
    """Twelve hexadecimal digits that stand for ``parts``."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]
