"""The one quantizer spec that simulation, packed rows, kernels and planners read."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from rolaq.common.errors import RolaqError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


class Part(NamedTuple):
    """One part of a packed row: byte offset, bytes, and the dtype its bytes are read as."""

    offset: int
    size: int
    dtype: str


class RowLayout(NamedTuple):
    """A token's packed row in one layer: `[codes | rope key | (scale, offset) per group]`.

    Codes are `d / 8` little-endian 16-bit words (see `quant.packing`), the RoPE key is `d_r` values of
    the spec's dtype, and the parameters are `groups` pairs (scale, offset). `size` is in bytes.
    """

    codes: Part
    rope: Part
    params: Part
    size: int


class QuantizerSpec(BaseModel):
    """Group-normalised four-level quantizer and the bytes it is stored in (paper §3.2, App. A.3).

    Frozen; unknown keys are refused. `a_out` and `threshold_init` are OSCAR's constants
    (Gaussian Lloyd–Max outer level and boundary); `a_in = a_out / 3` makes the grid uniform.
    `feedback_block` coordinates are rounded together, with the errors of all earlier ones fed back;
    0 rounds every coordinate to nearest. It changes the write alone, not what is stored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bits: Literal[2] = 2
    group_size: int = Field(default=128, gt=0, multiple_of=8)
    a_out: float = Field(default=1.5095585584640503, gt=0)
    threshold_init: float = 0.9810652732849121
    threshold_min: float = Field(default=0.5, gt=0)
    threshold_max: float = 1.25
    gain_rule: Literal["coupled", "free", "fixed"] = "coupled"
    sigma_eps: float = 1e-8
    stats_dtype: Literal["float32", "float16"] = "float32"
    rope_dtype: Literal["bfloat16", "float8_e4m3fn"] = "bfloat16"
    packing: Literal["word16-planes"] = "word16-planes"
    layout_version: Literal[1] = 1
    feedback_block: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> QuantizerSpec:
        if not self.threshold_min <= self.threshold_init <= self.threshold_max:
            raise ValueError(
                f"threshold_init {self.threshold_init} must lie in [{self.threshold_min}, {self.threshold_max}]"
            )
        if self.feedback_block and self.group_size % self.feedback_block:
            raise ValueError(f"feedback_block {self.feedback_block} must divide group_size {self.group_size}")
        return self

    @model_serializer(mode="wrap")
    def _without_absent_feedback(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A spec that rounds to nearest reads as it did before there was feedback, checksums included."""
        fields: dict[str, Any] = dump(self)
        if not fields.get("feedback_block"):
            fields.pop("feedback_block", None)
        return fields

    @property
    def a_in(self) -> float:
        """Inner reconstruction level; one third of the outer one."""
        return self.a_out / 3

    def check(self, latent_dim: int, where: str = "the model") -> None:
        """Raise `RolaqError` unless a latent of `latent_dim` splits into whole groups."""
        if latent_dim <= 0 or latent_dim % self.group_size:
            raise RolaqError(
                f"latent dimension {latent_dim} of {where} is not a multiple of the group size "
                f"{self.group_size}; set quant.spec.group_size to a divisor of {latent_dim}"
            )

    def check_threshold(self, value: float, where: str) -> None:
        """Raise `RolaqError` unless `value` lies within the spec's bounds for T."""
        if not self.threshold_min <= value <= self.threshold_max:
            raise RolaqError(
                f"threshold {value:.6g} of {where} is outside [{self.threshold_min}, {self.threshold_max}]"
            )

    def groups(self, latent_dim: int) -> int:
        """Number of groups in a latent of `latent_dim` coordinates."""
        self.check(latent_dim)
        return latent_dim // self.group_size

    def row(self, latent_dim: int, rope_dim: int) -> RowLayout:
        """Byte layout of one token's row in one layer.

        Parts follow each other without padding; for every model the project names (d 256 or 512,
        d_r 32 or 64) each part starts on a multiple of 32 bytes by itself.
        """
        codes = Part(0, latent_dim * self.bits // 8, "uint16")
        rope = Part(codes.size, rope_dim * DTYPE_BYTES[self.rope_dtype], self.rope_dtype)
        stats = 2 * self.groups(latent_dim) * DTYPE_BYTES[self.stats_dtype]
        params = Part(rope.offset + rope.size, stats, self.stats_dtype)
        return RowLayout(codes, rope, params, params.offset + params.size)

    def bytes_per_token(self, latent_dim: int, rope_dim: int) -> int:
        """Bytes of one unprotected token in one layer: `d/4 + 8 d/G + 2 d_r` by default (App. A.3)."""
        return self.row(latent_dim, rope_dim).size


def bf16_bytes_per_token(latent_dim: int, rope_dim: int) -> int:
    """Bytes of one token in one layer of an unquantized BF16 latent cache."""
    return 2 * (latent_dim + rope_dim)
