"""What the packed cache of a server is made of; travels to SGLang's processes in one variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rolaq.common.errors import RolaqError, one_line

VARIABLE = "ROLAQ_SERVE"
PLUGIN = "rolaq"
MAX_PROTECTED = 64  # rows of one sequence's window that the decode kernel reads exactly


class Settings(BaseModel):
    """Settings of the packed pool.

    Attributes:
        artifact: folder of the calibrated artifact.
        sink: first tokens of a sequence that stay BF16.
        recent: last tokens of a running sequence that stay BF16.
        sink_entries: sequences' sinks kept at once; each holds ``sink`` rows per layer.
        slots: most requests that run at once; each holds ``recent`` rows per layer.
        page_size: tokens of a page; all sinks of a sequence lie in its first page.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: str
    sink: int = Field(default=4, ge=0)
    recent: int = Field(default=16, ge=0)
    sink_entries: int = Field(default=1024, ge=1)
    slots: int = Field(default=256, ge=1)
    page_size: int = Field(default=64, ge=64, multiple_of=64)

    @model_validator(mode="after")
    def _bounds(self) -> Settings:
        if self.sink + self.recent > MAX_PROTECTED:
            raise ValueError(
                f"budget {self.budget} protects {self.sink + self.recent} tokens a sequence; "
                f"the decode kernel reads at most {MAX_PROTECTED}: choose a smaller budget"
            )
        return self

    @property
    def budget(self) -> str:
        """Protected tokens as written: ``4+16``."""
        return f"{self.sink}+{self.recent}"

    def environment(self) -> dict[str, str]:
        """The variables that turn the plugin on in SGLang's processes."""
        return {VARIABLE: self.model_dump_json(), "SGLANG_PLUGINS": PLUGIN}

    @classmethod
    def checked(cls, **values: Any) -> Settings:
        """Settings from plain values; a `RolaqError` says which of them cannot be served."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise RolaqError(one_line(first["msg"]).removeprefix("Value error, ")) from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings | None:
        """The settings this process was started with, or None where serving was not asked for.

        Raises:
            RolaqError: the variable holds something else than settings.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE)
        if not text:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise RolaqError(
                f"{VARIABLE} holds no settings ({one_line(error)}): start through `make serve`"
            ) from error
