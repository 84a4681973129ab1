"""Settings of an evaluation; `conf/eval.yaml` and `conf/suite/*.yaml` hold the values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rolaq.common.config import Config, DataConfig, ModelConfig, TrackingConfig
from rolaq.common.errors import RolaqError
from rolaq.eval.methods import PAPER
from rolaq.eval.passes import Budgets, Pass, known_methods
from rolaq.eval.ruler_config import RulerConfig
from rolaq.eval.task_config import BenchmarksConfig, ServerConfig

METHOD = "joint-learned-coupled-both"
"""The paper's method among the calibration runs: rotation, threshold, gain rule, objective."""
Gain = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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


class GainConfig(Config):
    """The gain sweep on validation text (paper, Figure 2b), which also picks OSCAR's best gain.

    ``length`` null: 8192 tokens, or the context where it is shorter.
    ``last`` scores the final positions of a sequence only (the paper: 1,024 of 8,192); null scores
    all but the first ones, as the divergence does.
    """

    gains: list[Gain] = [1.025, 1.069, 1.114, 1.160, 1.203, 1.248]
    length: int | None = Field(2048, ge=2)
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


class KappaConfig(Config):
    """The response sweep of a calibrated artifact by context length (paper, Figure 4), on validation text.

    ``lengths`` null: 2K to 32K in powers of two, as far as the context goes, or a quarter, half and all of a
    shorter one; ``documents`` per domain.
    """

    kappas: list[Gain] = [0.92, 0.96, 1.0, 1.041, 1.08, 1.12]
    lengths: list[int] | None = Field(None, min_length=1)
    documents: int = Field(1, ge=1)
    domains: list[str] | None = None

    def lengths_for(self, context: int) -> list[int]:
        """``lengths``, filled in for a model of so many tokens."""
        usual = [2048 << power for power in range(5) if 2048 << power <= context]
        short = [context // 4, context // 2, context]
        return self.lengths or (usual if len(usual) > 1 else short)


class SuiteConfig(Config):
    """What a run measures; null leaves a part out."""

    name: str
    divergence: DivergenceConfig | None = None
    ruler: RulerConfig | None = None
    benchmarks: BenchmarksConfig | None = None
    gain_sweep: GainConfig | None = None
    kappa_sweep: KappaConfig | None = None
    energy: bool = True
    methods: list[str] = list(PAPER)

    @property
    def passes(self) -> list[Pass]:
        """All passes of the parts that there are."""
        parts = [part.passes for part in (self.divergence, self.ruler, self.benchmarks) if part]
        return [item for passes in parts for item in passes]


class ProtectConfig(Config):
    """Protection budgets and how a token's own window is read in a teacher-forced pass."""

    budgets: Budgets = Field(min_length=1)
    reading: Literal["per_query", "storage", "serving"] = "per_query"


class EvalConfig(Config):
    """Everything `python -m rolaq.eval` takes.

    Attributes:
        calibration: ``<kind>/<seed>`` of a run below ``artifacts/<model>/runs``, where the calibration
            experiments put theirs; rows of other kinds than `METHOD` stand beside the usual ones.
        backend: ``simulated`` in Transformers, or ``server``: through the server at ``server.url``.
    """

    model: ModelConfig
    data: DataConfig
    tracking: TrackingConfig
    suite: SuiteConfig
    protect: ProtectConfig
    methods: list[str] = Field(list(PAPER), min_length=1)
    calibration: str | None = None
    backend: Literal["simulated", "server"] = "simulated"
    server: ServerConfig = ServerConfig()
    artifact: str = "auto"
    artifacts: str = "artifacts"
    output: str = "results"
    seed: int = 42
    threads: int | None = Field(None, ge=1)

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: list[str]) -> list[str]:
        return known_methods(names)

    @model_validator(mode="after")
    def _all_measured(self) -> EvalConfig:
        passes = self.suite.passes
        found = [name for item in passes for name in item.budgets or self.protect.budgets]
        missing = [name for name in self.protect.budgets if name not in found]
        if passes and missing:
            raise RolaqError(
                f"protect.budgets={missing}: no pass of suite.divergence, ruler or benchmarks measures them; "
                "add them to a pass or leave them out"
            )
        return self
