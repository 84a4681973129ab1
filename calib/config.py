"""Settings of `python -m rolaq.calib`, checked before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rolaq.common.config import Config, DataConfig, ModelConfig, TrackingConfig
from rolaq.common.errors import RolaqError, unknown
from rolaq.quant.metadata import FEEDBACK_METHOD
from rolaq.quant.rotation import KINDS
from rolaq.quant.spec import QuantizerSpec

PAPER_LENGTHS = (512, 2048, 4096)


class FeedbackConfig(Config):
    """Error feedback: the sensitivity, and the basis that rotations start from (see calib/README.md).

    batches: training batches, from the first, that the sensitivity is measured on. eps and whitening: candidates, of which
    the pair with the lowest validation KL is taken. centre: subtract the layer's mean latent.
    """

    sensitivity: Literal["fisher", "attention", "weights"] = "fisher"
    batches: PositiveInt = 16
    eps: tuple[PositiveFloat, ...] = Field(default=(0.02, 0.03, 0.05, 0.1), min_length=1)
    whitening: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        default=(0.4, 0.6, 0.75, 0.9), min_length=1
    )
    centre: bool = True
    start: Literal["equalising", "hadamard", "oscar"] = "equalising"


class QuantConfig(Config):
    """What is learned: rotation family, threshold, and the spec with its gain rule and bounds for T.

    With `feedback` the spec's feedback_block must be set; null rounds to nearest.
    """

    rotation: str = "joint"
    threshold: Literal["learned", "fixed"] = "learned"
    surrogate_width: PositiveFloat = 0.1
    detach_stats: bool = True
    spec: QuantizerSpec = QuantizerSpec()
    feedback: FeedbackConfig | None = None

    @property
    def method(self) -> str:
        """Name of the calibrated method, and of its artifact's folder."""
        return FEEDBACK_METHOD if self.feedback else "rolaq"

    def check(self) -> None:
        """Raise `RolaqError` for an unknown rotation family, or feedback without its block and the reverse."""
        if bool(self.feedback) != bool(self.spec.feedback_block):
            raise RolaqError(
                f"quant.feedback is {'set' if self.feedback else 'null'} and quant.spec.feedback_block is "
                f"{self.spec.feedback_block}: quant=feedback sets both"
            )
        if self.rotation not in KINDS:
            raise unknown("quant.rotation", self.rotation, KINDS)


class ValidationConfig(Config):
    """Held-out text for S: `documents` per length, every `every` steps; `weights` from short to long."""

    every: PositiveInt = 25
    documents: PositiveInt = 16
    batch_tokens: PositiveInt = 4096
    weights: tuple[float, ...] = (0.5, 0.25, 0.25)


class CalibConfig(Config):
    """Optimisation settings; the defaults are the paper's size (§4.1) and our choices where it is silent.

    `lengths` null means 512, 2048 and 4096 tokens, or a quarter, half and all of a shorter context.
    `chunk` is the number of positions whose logits exist at once. `fit_tokens` is OSCAR's N.
    """

    steps: PositiveInt = 350
    tokens_per_step: PositiveInt = 4096
    lengths: tuple[PositiveInt, ...] | None = None
    skip: int = Field(default=16, ge=0)
    fit_tokens: int = Field(default=8192, ge=128, le=8192)
    objective: Literal["kl", "attn", "both"] = "both"
    attention_weight: float = Field(default=0.1, ge=0)
    lr_rotation: PositiveFloat = 2e-3
    lr_threshold: PositiveFloat = 5e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    clip: PositiveFloat = 1.0
    chunk: PositiveInt = 1024
    checkpointing: Literal["auto", "on", "off"] = "auto"
    deterministic: bool = False
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _consistent(self) -> CalibConfig:
        if min(self.validation.weights) < 0 or not sum(self.validation.weights):
            raise ValueError(
                f"validation.weights {self.validation.weights} must not be negative, nor all zero"
            )
        if (self.lengths is not None and len(set(self.lengths)) != len(self.lengths)) or self.lengths == ():
            raise ValueError(f"lengths {self.lengths} must be different, and at least one")
        for length in self.lengths or ():
            if self.tokens_per_step % length:
                raise ValueError(
                    f"tokens_per_step {self.tokens_per_step} is not a multiple of the length {length}"
                )
            if length <= self.skip:
                raise ValueError(
                    f"length {length} leaves nothing to score after the first {self.skip} positions"
                )
        if len(self.validation.weights) != len(self.lengths or PAPER_LENGTHS):
            raise ValueError(f"validation.weights {self.validation.weights} needs one weight per length")
        return self

    @property
    def used_lengths(self) -> tuple[int, ...]:
        """`lengths` in ascending order, once `for_context` has filled them in."""
        if self.lengths is None:
            raise ValueError("lengths are not set yet: call for_context first")
        return self.lengths

    def for_context(self, context: int) -> CalibConfig:
        """These settings with `lengths` filled in; `RolaqError` if one exceeds the model's `context`."""
        lengths = self.lengths or (PAPER_LENGTHS if context >= PAPER_LENGTHS[-1] else _fractions(context))
        if max(lengths) > context:
            raise RolaqError(f"calib.lengths: {max(lengths)} tokens exceed the model's context of {context}")
        if any(self.tokens_per_step % length for length in lengths):
            raise RolaqError(
                f"calib.tokens_per_step={self.tokens_per_step} is not a multiple of lengths {lengths}"
            )
        return self.model_copy(update={"lengths": tuple(sorted(lengths))})


def _fractions(context: int) -> tuple[int, ...]:
    return tuple(context // share for share in (4, 2, 1))


class CalibrateConfig(Config):
    """Everything the command takes; results go to `folder`, by default `<output>/<model.name>`."""

    model: ModelConfig
    data: DataConfig
    quant: QuantConfig
    calib: CalibConfig
    tracking: TrackingConfig
    seed: int = Field(default=42, ge=0, lt=2**63)
    threads: PositiveInt | None = None
    output: str = "artifacts"
    folder: Annotated[str, Field(min_length=1)]
    overwrite: bool = False
