"""Building methods by name: hadamard from nothing, oscar, rolaq and rolaq-feedback from an artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolaq.common.errors import RolaqError
from rolaq.quant.methods.base import register
from rolaq.quant.methods.grouped import FourLevelMethod, hadamard_method
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.spec import QuantizerSpec

if TYPE_CHECKING:
    from rolaq.quant.artifact import Artifact


@register("hadamard")
def build_hadamard(
    name: str, *, artifact: Artifact | None, d: int, layers: int, spec: QuantizerSpec | None
) -> FourLevelMethod:
    """The block Hadamard with the four-level quantizer at unit response."""
    return hadamard_method(layers, d, spec)


@register("oscar", "rolaq", "rolaq-feedback")
def build_from_artifact(
    name: str, *, artifact: Artifact | None, d: int, layers: int, spec: QuantizerSpec | None
) -> FourLevelMethod | ShapedMethod:
    """The method that an artifact holds.

    Raises:
        RolaqError: no artifact, one of another method, of another spec or of another shape.
    """
    if artifact is None:
        raise RolaqError(f"method {name} needs a calibrated artifact; run `make calibrate` first")
    config = artifact.config
    if config.method != name:
        raise RolaqError(f"method {name} needs a {name} artifact, this one holds {config.method}")
    if spec is not None and spec != config.spec:
        raise RolaqError(
            f"method {name}: the spec asked for is not the artifact's ({spec} against {config.spec})"
        )
    if (config.model.layers, config.model.latent_dim) != (layers, d):
        raise RolaqError(
            f"method {name}: the artifact has {config.model.layers} layers of width {config.model.latent_dim}, "
            f"the model {layers} of width {d}"
        )
    return artifact.method()
