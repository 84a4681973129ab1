"""Metadata of an artifact: the model it belongs to, its spec, and where it came from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rolaq.quant.spec import QuantizerSpec

FORMAT_VERSIONS = (1, 2)
"""1: rotation, threshold, gain. 2: error feedback, with the tensors of `methods.shaped.ShapedMethod`."""
FEEDBACK_METHOD = "rolaq-feedback"


class ModelIdentity(BaseModel):
    """The model an artifact belongs to. `weights` is `adapters.layers.weights_fingerprint`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    revision: str | None = None
    architecture: str
    latent_dim: int
    rope_dim: int
    layers: int
    weights: str


class ArtifactConfig(BaseModel):
    """Everything about an artifact but its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1, 2] = 1
    method: Literal["oscar", "rolaq", "rolaq-feedback"]
    spec: QuantizerSpec
    model: ModelIdentity
    threshold: list[float]
    gain: list[float]
    tensors_sha256: str
    checksum: str = ""
    data: dict[str, Any] = {}
    tokens: int = 0
    seed: int | None = None
    selection: dict[str, Any] = {}
    environment: dict[str, Any] = {}

    @property
    def feedback(self) -> bool:
        """Whether rows are written with error feedback."""
        return self.method == FEEDBACK_METHOD
