"""Settings of an evaluation; `conf/eval.yaml` and `conf/suite/*.yaml` hold the values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from rolaq.common.config import Config, DataConfig, ModelConfig, TrackingConfig
from rolaq.common.errors import RolaqError, lookup
from rolaq.eval.methods import METHODS, PAPER
from rolaq.quant.protection import Protection

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
    "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery",
)  # fmt: skip
RULER_SHORT = dict(zip(RULER_TASKS, ("S1", "S2", "S3", "MK1", "MK2", "MK3", "MV", "MQ"), strict=True))


def _known_methods(names: list[str]) -> list[str]:
    return [name for name in names if lookup("method", name, METHODS)]


def _budget(text: str) -> str:
    """A budget in its usual spelling."""
    try:
        return Protection.parse(text).budget
    except RolaqError as error:
        raise ValueError(str(error)) from error


def _distinct(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


Budgets = Annotated[list[Annotated[str, AfterValidator(_budget)]], AfterValidator(_distinct)]
Gain = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Pass(Config):
    """Some methods at some budgets; null means all that the run has.

    A budget (``4+16``: sink and recent tokens) that is not in ``protect.budgets`` is left out.
    """

    budgets: Budgets | None = None
    methods: list[str] | None = Field(None, min_length=1)

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: list[str] | None) -> list[str] | None:
        return None if names is None else _known_methods(names)


class DivergencePass(Pass):
    """One set of KL measurements: which lengths, and how many sequences per domain and length."""

    lengths: list[int] = Field(min_length=1)
    documents: int = Field(ge=1)
    domains: list[str] | None = None


class DivergenceConfig(Config):
    """KL to BF16 and perplexity on test text.

    Attributes:
        skip: positions at the start of a sequence that are not scored.
        batch_tokens: tokens per forward pass.
        logits_gb: bound on the teacher's log-probabilities of a batch, tokens * vocabulary * 4 bytes;
            makes smaller batches where the vocabulary is large.
        chunk: positions whose KL is computed at once.
        prefill: tokens per forward chunk with ``reading=serving``, which needs a cache to read.
    """

    passes: list[DivergencePass]
    skip: int = Field(16, ge=0)
    batch_tokens: int = Field(4096, ge=1)
    logits_gb: float = Field(4.0, gt=0)
    chunk: int = Field(1024, ge=1)
    prefill: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _scored(self) -> DivergenceConfig:
        shortest = min((length for item in self.passes for length in item.lengths), default=None)
        if shortest is not None and shortest <= self.skip + 1:
            raise ValueError(f"a pass has lengths={shortest}: must be more than skip + 1 = {self.skip + 1}")
        return self


class RulerConfig(Config):
    """RULER's retrieval tasks.

    Attributes:
        passes: which methods at which budgets.
        essay: files of the essay haystack; null looks for RULER's essays under ``data.root`` and
            else takes the ``essay_domain`` documents of the test text.
        new_tokens: tokens that prompts leave room for (the official 128).
        generate: tokens that are generated at most; null for ``new_tokens``. Answers of the eight
            tasks in one token per digit take up to 40.
        batch_tokens: prompt tokens that are generated from at once.
    """

    passes: list[Pass]
    tasks: list[Literal[RULER_TASKS]] = list(RULER_TASKS)  # type: ignore[valid-type]
    lengths: list[int] = [1024]
    samples: int = Field(100, ge=1)
    essay: list[str] | None = None
    essay_domain: str = "books"
    new_tokens: int = Field(128, ge=1)
    generate: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16384, ge=1)

    @field_validator("generate")
    @classmethod
    def _room(cls, generate: int | None, info: ValidationInfo) -> int | None:
        room = info.data.get("new_tokens", 128)
        if generate is not None and generate > room:
            raise ValueError(f"must be at most new_tokens, {room}, which is what prompts leave room for")
        return generate


class GainConfig(Config):
    """The gain sweep on validation text (paper, Figure 2b), which also picks OSCAR's best gain.

    ``last`` scores the final positions of a sequence only (the paper: 1,024 of 8,192); null scores
    all but the first ones, as the divergence does.
    """

    gains: list[Gain] = [1.025, 1.069, 1.114, 1.160, 1.203, 1.248]
    length: int = Field(2048, ge=2)
    documents: int = Field(1, ge=1)
    domains: list[str] | None = None
    last: int | None = Field(None, ge=1)

    @field_validator("last")
    @classmethod
    def _inside(cls, last: int | None, info: ValidationInfo) -> int | None:
        length = info.data.get("length")
        if last is not None and length is not None and last >= length:
            raise ValueError(f"must be less than length, {length}")
        return last


class SuiteConfig(Config):
    """What a run measures; null leaves a part out."""

    name: str
    divergence: DivergenceConfig | None = None
    ruler: RulerConfig | None = None
    gain_sweep: GainConfig
    energy: bool = True

    @property
    def passes(self) -> list[Pass]:
        """All passes of the parts that there are."""
        parts = [part.passes for part in (self.divergence, self.ruler) if part]
        return [item for passes in parts for item in passes]


class ProtectConfig(Config):
    """Protection budgets and how a token's own window is read in a teacher-forced pass."""

    budgets: Budgets = Field(min_length=1)
    reading: Literal["per_query", "storage", "serving"] = "per_query"


class EvalConfig(Config):
    """Everything `python -m rolaq.eval` takes."""

    model: ModelConfig
    data: DataConfig
    tracking: TrackingConfig
    suite: SuiteConfig
    protect: ProtectConfig
    methods: list[str] = Field(list(PAPER), min_length=1)
    artifact: str = "auto"
    artifacts: str = "artifacts"
    output: str = "results"
    seed: int = 42
    threads: int | None = Field(None, ge=1)

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: list[str]) -> list[str]:
        return _known_methods(names)

    @model_validator(mode="after")
    def _all_measured(self) -> EvalConfig:
        passes = self.suite.passes
        found = [name for item in passes for name in item.budgets or self.protect.budgets]
        missing = [name for name in self.protect.budgets if name not in found]
        if passes and missing:
            raise RolaqError(
                f"protect.budgets={missing}: no pass of suite.divergence or suite.ruler measures them; "
                "add them to a pass or leave them out"
            )
        return self
