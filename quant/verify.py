"""Checks of an artifact; each failure is one line that names the field and both values."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.metadata import ArtifactConfig, ModelIdentity
from rolaq.quant.response import gain as coupled_gain

ORTHOGONALITY_TOLERANCE = 1e-4
GAIN_TOLERANCE = 1e-5


def verify_model(expected: ModelIdentity, actual: ModelIdentity, where: str) -> None:
    """Raise `RolaqError` naming the first field in which the artifact's model differs from `actual`."""
    for name in ("architecture", "latent_dim", "rope_dim", "layers", "weights"):
        wanted, found = getattr(expected, name), getattr(actual, name)
        if wanted != found:
            raise RolaqError(
                f"artifact {where} belongs to another model: {name} is {wanted} ({expected.name}), "
                f"the loaded model's is {found} ({actual.name}); calibrate this model first"
            )


def checksum(config: ArtifactConfig) -> str:
    """SHA-256 of all of `config` but the checksum itself."""
    return hashlib.sha256(config.model_dump_json(exclude={"checksum"}).encode()).hexdigest()


def verify_checksum(config: ArtifactConfig, where: str) -> None:
    """Raise `RolaqError` when a value of the config was changed since it was written."""
    if (found := checksum(config)) != config.checksum:
        raise RolaqError(
            f"artifact {where} is damaged: its config's checksum is {found[:12]}, it says {config.checksum[:12]!r}"
        )


def tensor_shapes(model: ModelIdentity) -> dict[str, tuple[int, ...]]:
    """The tensors of an artifact and their shapes."""
    return {
        "rotation": (model.layers, model.latent_dim, model.latent_dim),
        "threshold": (model.layers,),
        "gain": (model.layers,),
    }


def verify_tensors(config: ArtifactConfig, tensors: dict[str, Tensor], where: str) -> None:
    """Raise `RolaqError` for a wrong shape, a value that is not finite, out of bounds or not as listed."""
    for name, shape in tensor_shapes(config.model).items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise RolaqError(f"artifact {where}: {name} has shape {found}, the model needs {shape}")
        if not torch.isfinite(tensors[name]).all():
            raise RolaqError(f"artifact {where}: {name} holds values that are not finite")
    config.spec.check(config.model.latent_dim, where)
    _verify_orthogonal(tensors["rotation"], where)
    for name in ("threshold", "gain"):
        _verify_listed(name, tensors[name], getattr(config, name), where)
    for layer, threshold in enumerate(tensors["threshold"].tolist()):
        config.spec.check_threshold(threshold, f"layer {layer} in {where}")
    if config.method == "rolaq" and config.spec.gain_rule == "coupled":
        _verify_gain(config, tensors, where)


def _verify_listed(name: str, values: Tensor, listed: list[float], where: str) -> None:
    if len(listed) != len(values):
        raise RolaqError(
            f"artifact {where}: the config lists {len(listed)} values of {name}, the tensors hold {len(values)}"
        )
    for layer, (value, other) in enumerate(zip(values.tolist(), listed, strict=True)):
        if abs(value - other) > 1e-6:
            raise RolaqError(
                f"artifact {where}: {name} of layer {layer} is {value:.7g}, the config lists {other:.7g}"
            )


def _verify_orthogonal(rotation: Tensor, where: str) -> None:
    rotation = rotation.double()
    eye = torch.eye(rotation.shape[-1], dtype=rotation.dtype)
    error = (rotation.mT @ rotation - eye).abs().amax((-2, -1))
    worst = int(error.argmax())
    if error[worst] > ORTHOGONALITY_TOLERANCE:
        raise RolaqError(
            f"artifact {where}: rotation of layer {worst} is not orthogonal, "
            f"max |R^T R - I| is {error[worst]:.2e}, allowed {ORTHOGONALITY_TOLERANCE:.0e}"
        )


def _verify_gain(config: ArtifactConfig, tensors: dict[str, Tensor], where: str) -> None:
    expected = coupled_gain(tensors["threshold"].double(), config.spec)
    worst = int((tensors["gain"] - expected).abs().argmax())
    if abs(tensors["gain"][worst].item() - expected[worst].item()) > GAIN_TOLERANCE:
        raise RolaqError(
            f"artifact {where}: gain of layer {worst} is {tensors['gain'][worst]:.6f}, 1/C(T) is {expected[worst]:.6f}"
        )
