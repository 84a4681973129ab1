"""Settings of the six benchmarks, and of a server that they may run through."""

from __future__ import annotations

from pydantic import Field, field_validator

from rolaq.common.config import Config
from rolaq.common.errors import lookup
from rolaq.eval.benchmarks import BENCHMARKS
from rolaq.eval.passes import Budget, Pass


class BenchmarksConfig(Config):
    """The six benchmarks through lm-eval, greedy.

    Attributes:
        passes: which methods at which budgets.
        tasks: which of them.
        shots: examples in the prompt, by benchmark; the usual number where it is not given.
        limit: items per benchmark, of MMLU and CMMLU per subject; null for all. By benchmark, or one for all.
        root: folder of local files; null takes ``data.root`` with ``data=local``, else the Hugging Face hub.
        batch_size: rows at once; null finds out what fits.
        timeout: seconds that a generated program may run.
        memory_mb: memory that it may use.
        workers: programs at once; null for one a core.
    """

    passes: list[Pass]
    tasks: list[str] = Field(list(BENCHMARKS), min_length=1)
    shots: dict[str, int] = {}
    limit: int | dict[str, int] | None = None
    root: str | None = None
    batch_size: int | None = Field(None, ge=1)
    timeout: float = Field(10.0, gt=0)
    memory_mb: int = Field(2048, ge=64)
    workers: int | None = Field(None, ge=1)

    @field_validator("tasks")
    @classmethod
    def _tasks(cls, names: list[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if lookup("benchmark", name, BENCHMARKS)]

    @field_validator("shots", "limit")
    @classmethod
    def _named(cls, values: object) -> object:
        for name, value in values.items() if isinstance(values, dict) else ():
            lookup("benchmark", name, BENCHMARKS)
            if value < 0:
                raise ValueError(f"{name}: {value} is negative")
        if isinstance(values, int) and values < 1:
            raise ValueError("must be at least 1, or null for all items")
        return values

    def shots_of(self, name: str) -> int:
        """Examples in the prompt of a benchmark."""
        return self.shots.get(name, BENCHMARKS[name].shots)

    def limit_of(self, name: str) -> int | None:
        """The limit of a benchmark, None for all its items."""
        return self.limit.get(name) if isinstance(self.limit, dict) else self.limit


class ServerConfig(Config):
    """A running server for ``backend=server``.

    Attributes:
        url: its address, such as ``http://localhost:30000``.
        model: the name that it serves; null asks it.
        method: what its cache holds: ``rolaq``, or ``bf16`` for the stock server.
        seed: of the calibration that it serves, for the record.
        budget: its token protection.
        concurrency: requests at once.
        timeout: seconds for one request.
    """

    url: str = "http://localhost:30000"
    model: str | None = None
    method: str = "rolaq"
    seed: int | None = None
    budget: Budget = "0+0"
    concurrency: int = Field(16, ge=1)
    timeout: float = Field(600.0, gt=0)
