"""Which methods a part of an evaluation runs, at which budgets."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from rolaq.common.config import Config
from rolaq.common.errors import RolaqError, lookup
from rolaq.eval.methods import METHODS
from rolaq.quant.protection import Protection


def known_methods(names: list[str]) -> list[str]:
    """``names`` as they are; `RolaqError` with a suggestion where one is not a method."""
    return [name for name in names if lookup("method", name, METHODS)]


def _budget(text: str) -> str:
    """A budget in its usual spelling."""
    try:
        return Protection.parse(text).budget
    except RolaqError as error:
        raise ValueError(str(error)) from error


def _distinct(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


Budget = Annotated[str, AfterValidator(_budget)]
Budgets = Annotated[list[Budget], AfterValidator(_distinct)]


class Pass(Config):
    """Some methods at some budgets; null means all that the run has.

    A budget (``4+16``: sink and recent tokens) that is not in ``protect.budgets`` is left out.
    """

    budgets: Budgets | None = None
    methods: list[str] | None = Field(None, min_length=1)

    @field_validator("methods")
    @classmethod
    def _methods(cls, names: list[str] | None) -> list[str] | None:
        return None if names is None else known_methods(names)
