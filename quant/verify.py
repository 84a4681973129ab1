"""Checks of an artifact; each failure is one line that names the field and both values."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.metadata import FEEDBACK_METHOD, ArtifactConfig, ModelIdentity
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


Kind = tuple[tuple[int, ...], torch.dtype]


def tensor_kinds(model: ModelIdentity, method: str) -> dict[str, Kind]:
    """The tensors of a method's artifact: shape and dtype of each."""
    layers, d = model.layers, model.latent_dim
    kinds: dict[str, Kind] = dict.fromkeys(("threshold", "gain"), ((layers,), torch.float32))
    kinds["rotation"] = (layers, d, d), torch.float32
    if method == FEEDBACK_METHOD:
        kinds["inverse"], kinds["feedback"] = kinds["rotation"], ((layers, d, d), torch.int8)
        kinds["mean"] = kinds["feedback_unit"] = (layers, d), torch.float32
    return kinds


def verify_tensors(config: ArtifactConfig, tensors: dict[str, Tensor], where: str) -> None:
    """Raise `RolaqError` for a wrong shape, a value that is not finite, out of bounds or not as listed."""
    for name, (shape, dtype) in tensor_kinds(config.model, config.method).items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise RolaqError(f"artifact {where}: {name} has shape {found}, the model needs {shape}")
        if tensors[name].dtype != dtype:
            raise RolaqError(f"artifact {where}: {name} is {tensors[name].dtype}, it has to be {dtype}")
        if not torch.isfinite(tensors[name]).all():
            raise RolaqError(f"artifact {where}: {name} holds values that are not finite")
    config.spec.check(config.model.latent_dim, where)
    if config.method == FEEDBACK_METHOD:
        _verify_feedback(config, tensors, where)
    else:
        _verify_inverse(tensors["rotation"], tensors["rotation"].mT, "orthogonal", where)
    for name in ("threshold", "gain"):
        _verify_listed(name, tensors[name], getattr(config, name), where)
    for layer, threshold in enumerate(tensors["threshold"].tolist()):
        config.spec.check_threshold(threshold, f"layer {layer} in {where}")
    if config.method != "oscar" and config.spec.gain_rule == "coupled":
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


def _verify_inverse(matrix: Tensor, inverse: Tensor, what: str, where: str) -> None:
    product = inverse.double() @ matrix.double()
    error = (product - torch.eye(matrix.shape[-1], dtype=product.dtype)).abs().amax((-2, -1))
    worst = int(error.argmax())
    if error[worst] > ORTHOGONALITY_TOLERANCE:
        raise RolaqError(
            f"artifact {where}: rotation of layer {worst} is not {what}, "
            f"max |R^T R - I| is {error[worst]:.2e}, allowed {ORTHOGONALITY_TOLERANCE:.0e}"
        )


def _verify_feedback(config: ArtifactConfig, tensors: dict[str, Tensor], where: str) -> None:
    _verify_inverse(tensors["rotation"], tensors["inverse"], "undone by its inverse", where)
    if not (block := config.spec.feedback_block):
        raise RolaqError(f"artifact {where}: feedback_block is 0, {config.method} needs a block")
    index = torch.arange(config.model.latent_dim) // block
    if tensors["feedback"][:, index[:, None] >= index].any():
        raise RolaqError(f"artifact {where}: feedback holds weights from later blocks or the same block")
    if (lowest := tensors["feedback_unit"].min().item()) < 0:
        raise RolaqError(f"artifact {where}: feedback_unit holds {lowest:.3g}, it must not be negative")


def _verify_gain(config: ArtifactConfig, tensors: dict[str, Tensor], where: str) -> None:
    expected = coupled_gain(tensors["threshold"].double(), config.spec)
    worst = int((tensors["gain"] - expected).abs().argmax())
    if abs(tensors["gain"][worst].item() - expected[worst].item()) > GAIN_TOLERANCE:
        raise RolaqError(
            f"artifact {where}: gain of layer {worst} is {tensors['gain'][worst]:.6f}, 1/C(T) is {expected[worst]:.6f}"
        )
