"""Token protection: which cached latents stay exact, and who sees them exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rolaq.common.errors import RolaqError, unknown

Reading = Literal["per_query", "storage", "serving"]


@dataclass(frozen=True)
class Protection:
    """The first `sink` and the last `recent` tokens keep an exact latent (RoLaQ, section 4.1).

    The reading says whose last tokens those are when several queries are computed at once. They
    agree wherever one token is decoded at a time.

    - `per_query`: each query sees its own last `recent` tokens exact, itself among them.
    - `storage`: every query sees the window as it stands at the sequence's end.
    - `serving`: a chunk of several tokens sees itself exact and the past as the cache holds it.

    Raises:
        RolaqError: a negative or non-integer budget, or an unknown reading.
    """

    sink: int = 0
    recent: int = 0
    reading: Reading = "per_query"

    def __post_init__(self) -> None:
        for field in ("sink", "recent"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RolaqError(f"protection {field}={value!r}: must be a whole number of tokens, 0 or more")
        if self.reading not in get_args(Reading):
            raise unknown("reading", str(self.reading), get_args(Reading))

    @classmethod
    def parse(cls, budget: str, reading: Reading = "per_query") -> Protection:
        """`"4+16"` as four sinks and sixteen recent tokens.

        Raises:
            RolaqError: the text is not two whole numbers joined by `+`.
        """
        sink, plus, recent = str(budget).replace(" ", "").partition("+")
        if not plus or not (sink.isdecimal() and recent.isdecimal()):
            raise RolaqError(f"protection budget {budget!r}: write sinks+recent, for example 4+16")
        return cls(int(sink), int(recent), reading)

    @property
    def budget(self) -> str:
        """The budget as written: `"4+16"`."""
        return f"{self.sink}+{self.recent}"

    def window_start(self, tokens: int) -> int:
        """The first position of the recent window when the sequence holds `tokens`."""
        return max(tokens - self.recent, 0)


UNPROTECTED = Protection()
"""No token is exact."""
