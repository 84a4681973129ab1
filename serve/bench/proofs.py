"""Settings of what proves the server: parity, tensor parallelism, load and faults, a long conversation."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rolaq.common.config import Config


class Tiny(Config):
    """A small model with real weights: its folder, its artifact, and text for prompts."""

    name: str
    path: str
    artifact: str
    text: list[str] = Field(min_length=1)
    args: dict[str, Any] = {}


class ParityConfig(Config):
    """Served against simulated.

    Attributes:
        budgets: protection budgets.
        lengths: prompt lengths; ``per_length`` prompts of each.
        new_tokens: tokens generated after each prompt, the positions that are compared.
        chunk: tokens of a chunk where the prefill is in many chunks.
        kl: bound on the mean KL, nats.
        folder: where the servers leave logits for the simulation.
        parallel: servers that run at once.
    """

    budgets: list[str] = Field(min_length=1)
    lengths: list[int] = Field(min_length=1)
    per_length: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    chunk: int = Field(ge=64, multiple_of=64)
    kl: float = Field(gt=0)
    folder: str
    parallel: int = Field(ge=1)


class Agreement(Config):
    """When two greedy outputs count as the same, although sums in another order round differently.

    Attributes:
        margin: nats between the two best tokens below which a changed token is a tie.
        drift: bound on the mean difference of the tokens' log-probabilities up to there, nats.
    """

    margin: float = Field(gt=0)
    drift: float = Field(gt=0)


class TpConfig(Config):
    """Tensor parallelism of ``size`` against one GPU; ``layers`` and ``experts`` of the large shape."""

    size: int = Field(ge=2)
    prompts: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    layers: int = Field(ge=2)
    experts: int = Field(ge=8)
    same: Agreement


class SoakConfig(Config):
    """Load and faults.

    Attributes:
        url: a running server; null starts one on the small model with a pool of ``pool_tokens``.
        key: the server's API key.
        minutes: how long.
        clients: requests kept in flight.
        probes: prompts whose outputs must not change.
    """

    url: str | None = None
    key: str | None = None
    minutes: float = Field(gt=0)
    clients: int = Field(ge=1)
    pool_tokens: int = Field(ge=4096)
    probes: int = Field(ge=1)
    same: Agreement


class ConversationConfig(Config):
    """A conversation of ``tokens`` with and without the prefix cache, on the small model.

    Attributes:
        turn: tokens that a turn adds; ``answer`` of them are generated.
        share: least share of turns whose answers are the same.
    """

    tokens: int = Field(ge=128)
    turn: int = Field(ge=64)
    answer: int = Field(ge=1)
    share: float = Field(gt=0, le=1)
    same: Agreement
