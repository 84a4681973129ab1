"""The interface every KV-cache method implements, and the registry that builds one by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError, lookup
from rolaq.quant.spec import QuantizerSpec

_MODULES = ("baselines", "kvarn", "calibrated", "shaped")
_FACTORIES: dict[str, Callable[..., Method]] = {}


class Method(Protocol):
    """Turns latents into what the cache would give back: `c_hat = DQ(Q(c))`."""

    name: str
    exact: bool
    """True where nothing is changed: adapters then install nothing at all."""

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """The latents of one write event after quantization and back.

        Args:
            latent: `[B, n, d]`, any float dtype; every row's tokens at positions `start … start + n - 1`.
            layer: index among the model's MLA layers, from 0.
            valid: `[B, n]` bool, False for padding; None when every token is real.

        Returns:
            The same shape and dtype; computed in fp32. Padding may come back as anything.
        """
        ...

    # A method may also have `by_token(tokens)`, see `Uncalibrated`: left-padded batches are then quantized in one
    # call instead of one for each length.


class Uncalibrated:
    """What the methods without tensors of their own share."""

    exact = False

    def __init__(self, spec: QuantizerSpec | None = None) -> None:
        self.spec = spec or QuantizerSpec()

    def by_token(self, tokens: int) -> bool:
        """Whether an event of so many tokens a row is quantized token by token, whatever their positions."""
        return True

    def to(self, device: torch.device | str) -> Self:
        """The method itself: it works where the latents are."""
        return self


def register(*names: str) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Make a factory `(name, *, artifact, d, layers, spec, **options) -> Method` known by `names`."""

    def keep(factory: Callable[..., Method]) -> Callable[..., Method]:
        _FACTORIES.update(dict.fromkeys(names, factory))
        return factory

    return keep


def _factories() -> dict[str, Callable[..., Method]]:
    for module in _MODULES:
        importlib.import_module(f"rolaq.quant.methods.{module}")
    return _FACTORIES


def available() -> list[str]:
    """The names that `build_method` knows, sorted."""
    return sorted(_factories())


def build_method(
    name: str,
    *,
    d: int,
    layers: int,
    artifact: Any = None,
    spec: QuantizerSpec | None = None,
    **options: Any,
) -> Method:
    """Build a method by name: `bf16 rtn quarot kvarn hadamard oscar rolaq`, and those with error feedback.

    Args:
        d: the latent's width; `layers`: the number of MLA layers.
        artifact: the calibration's `Artifact`, for oscar, rolaq and rolaq-feedback.
        spec: the quantizer; None for the artifact's own, or the defaults.
        options: the method's own, such as KVarN's `clip`, or the `energies` of hadamard-feedback and weights-feedback.

    Raises:
        RolaqError: an unknown name, an option that the method does not have, a width that it cannot take, or
            an artifact that is missing or another method's.
    """
    factory = lookup("method", name, _factories())
    arguments = {"artifact": artifact, "d": d, "layers": layers, "spec": spec, **options}
    try:
        inspect.signature(factory).bind(name, **arguments)
    except TypeError as error:
        raise RolaqError(f"method {name}: {error}") from None
    return factory(name, **arguments)
