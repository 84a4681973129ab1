"""Settings of `python -m rolaq.serve.bench`; `conf/bench.yaml` holds the values."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rolaq.common.config import Config
from rolaq.common.files import find
from rolaq.serve.bench.proofs import ConversationConfig, ParityConfig, SoakConfig, Tiny, TpConfig


class Shape(Config):
    """The model that speed is measured on.

    Attributes:
        name: name in results.
        config: its ``config.json``; weights are SGLang's dummy ones.
        path: a folder with real weights and a ``config.json`` instead.
        artifact: the artifact that fits real weights; null makes one of Hadamard rotations.
    """

    name: str
    config: str
    path: str | None = None
    artifact: str | None = None

    @model_validator(mode="after")
    def _together(self) -> Shape:
        if (self.path is None) != (self.artifact is None):
            raise ValueError("path and artifact belong together: give both, or neither for dummy weights")
        return self

    @property
    def config_file(self) -> str:
        """The ``config.json`` in use."""
        return find(self.config) if self.path is None else f"{find(self.path)}/config.json"


class Implementation(Config):
    """A cache and its attention: `budget` (as ``4+16``) for the packed INT2 cache, null for SGLang's own.

    ``args`` are SGLang's server arguments with underscores; ``ttft_args`` replace some of them where the time
    to the first token is measured, in a start of its own.
    """

    budget: str | None = None
    args: dict[str, Any] = {}
    ttft_args: dict[str, Any] = {}


class Serving(Config):
    """What all servers of one run share.

    Attributes:
        mem_fraction: share of the GPU's memory for weights and cache.
        slots: most requests that run at once.
        sink_entries: sequences whose sinks are kept (INT2).
        chunk: tokens of a prefill chunk.
        context: longest sequence; above the model's own it is forced.
        graph_batches: decode batch sizes that get a CUDA graph.
        args: further server arguments.
        start_s: seconds after which a server that does not answer is given up.
    """

    mem_fraction: float = Field(gt=0, lt=1)
    slots: int = Field(ge=1)
    sink_entries: int = Field(ge=1)
    chunk: int
    context: int = Field(ge=1)
    graph_batches: list[int]
    args: dict[str, Any] = {}
    start_s: float = Field(gt=0)


class DecodeConfig(Config):
    """Decode throughput by context.

    Attributes:
        requests: sequences decoded at once.
        inputs: prompt lengths, reached with a prefill that skips attention.
        tokens: tokens generated at each; the first ``drop`` are left out.
        interval: output positions over which throughput is averaged.
    """

    requests: int = Field(ge=1)
    inputs: list[int] = Field(min_length=1)
    tokens: int = Field(ge=2)
    drop: int = Field(ge=1)
    interval: tuple[int, int]

    @model_validator(mode="after")
    def _some(self) -> DecodeConfig:
        if self.drop + 8 > self.tokens:
            raise ValueError(f"tokens={self.tokens} leaves less than 8 after the {self.drop} dropped ones")
        if self.inputs != sorted(set(self.inputs)):
            raise ValueError("inputs must rise: each prompt continues the one before it")
        return self


class TtftConfig(Config):
    """Time to the first token of a burst of simultaneous requests.

    Attributes:
        requests: concurrency levels; the largest is the burst, the others are its first requests.
        input_tokens, output_tokens: of each request.
        against: the implementation that is measured first.
        factor: others are cut off after so many times its P99; their row then says ``at least``.
        limit_s: seconds after which any burst is cut off.
    """

    requests: list[int] = Field(min_length=1)
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    against: str
    factor: float = Field(gt=1)
    limit_s: float = Field(gt=0)


class BenchConfig(Config):
    """All of it; ``run`` names the parts, ``use`` the implementations."""

    run: list[str] = Field(min_length=1)
    use: list[str] = Field(min_length=1)
    output: str
    record: bool = False
    seed: int = 0
    model: Shape
    tiny: Tiny
    implementations: dict[str, Implementation]
    server: Serving
    decode: DecodeConfig
    ttft: TtftConfig
    parity: ParityConfig
    tp: TpConfig
    soak: SoakConfig
    conversation: ConversationConfig
