"""Settings of RULER's retrieval tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from rolaq.common.config import Config
from rolaq.eval.passes import Pass

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
    "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery",
)  # fmt: skip
RULER_SHORT = dict(zip(RULER_TASKS, ("S1", "S2", "S3", "MK1", "MK2", "MK3", "MV", "MQ"), strict=True))
PAPER_LENGTHS = (8192, 16384)


class RulerConfig(Config):
    """RULER's retrieval tasks.

    Attributes:
        passes: which methods at which budgets.
        essay: files of the essay haystack; null looks for RULER's essays under ``data.root`` and
            else takes the ``essay_domain`` documents of the test text.
        new_tokens: tokens that prompts leave room for (the official 128).
        generate: tokens that are generated at most; null for ``new_tokens``. Answers of the eight
            tasks in one token per digit take up to 40.
        lengths: tokens of prompt and answer; null for 8K and 16K, or half and all of a shorter context.
        batch_tokens: prompt tokens that are generated from at once; null finds out what fits.
    """

    passes: list[Pass]
    tasks: list[Literal[RULER_TASKS]] = list(RULER_TASKS)  # type: ignore[valid-type]
    lengths: list[int] | None = None
    samples: int = Field(100, ge=1)
    essay: list[str] | None = None
    essay_domain: str = "books"
    new_tokens: int = Field(128, ge=1)
    generate: int | None = Field(None, ge=1)
    batch_tokens: int | None = Field(None, ge=1)

    @field_validator("generate")
    @classmethod
    def _room(cls, generate: int | None, info: ValidationInfo) -> int | None:
        room = info.data.get("new_tokens", 128)
        if generate is not None and generate > room:
            raise ValueError(f"must be at most new_tokens, {room}, which is what prompts leave room for")
        return generate

    def for_context(self, context: int) -> RulerConfig:
        """These settings with ``lengths`` filled in for a model of so many tokens."""
        lengths = self.lengths or [n for n in PAPER_LENGTHS if n <= context] or [context // 2, context]
        return self.model_copy(update={"lengths": lengths})

    @property
    def used_lengths(self) -> list[int]:
        """``lengths``, once `for_context` has filled them in."""
        if self.lengths is None:
            raise ValueError("lengths are not set yet: call for_context first")
        return self.lengths
