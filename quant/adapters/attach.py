"""Attaching a method to a model, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

from torch import Tensor, nn

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.hooks import Hooks
from rolaq.quant.adapters.layers import MLALayer, find_decoder, find_mla_layers, find_readers
from rolaq.quant.adapters.session import Session
from rolaq.quant.methods.base import Method
from rolaq.quant.protection import UNPROTECTED, Protection
from rolaq.quant.spec import QuantizerSpec

_attached: WeakSet[nn.Module] = WeakSet()


@contextmanager
def attach(model: nn.Module, method: Method, protection: Protection | str = UNPROTECTED) -> Iterator[None]:
    """Let every MLA layer of `model` read its latents as `method` would store them.

    `protection` may be a budget such as "4+16", read per query.

    Holds for forwards with and without a cache and for `generate`. Without a cache, gradients flow through
    `method.reconstruct`; run the backward pass inside the block. An exact method installs nothing. A cache filled
    inside the block cannot be used outside it.

    Raises:
        RolaqError: the model has no MLA, something is attached to it already, or the method does not fit a layer.
    """
    if isinstance(protection, str):
        protection = Protection.parse(protection)
    layers, decoder = find_mla_layers(model), find_decoder(model)
    if decoder in _attached:
        raise RolaqError(
            f"{type(decoder).__name__} already has a method attached: leave that attach block first"
        )
    with ExitStack() as stack:
        _attached.add(decoder)
        stack.callback(_attached.discard, decoder)
        if not method.exact:
            _check(method, layers)
            hooks = Hooks(decoder, layers, find_readers(decoder), Session(method, protection))
            stack.callback(hooks.remove)
            hooks.install()
        yield


def _check(method: Method, layers: list[MLALayer]) -> None:
    spec: QuantizerSpec | None = getattr(method, "spec", None)
    rotation: Tensor | None = getattr(method, "rotation", None)
    if spec is not None:
        for layer in layers:
            spec.check(layer.latent_dim, layer.name)
    if rotation is None:
        return
    for layer in layers:
        if rotation.shape[-1] != layer.latent_dim:
            raise RolaqError(
                f"method {method.name} is for latents of {rotation.shape[-1]}, {layer.name} has {layer.latent_dim}"
            )
    if rotation.shape[0] != len(layers):
        raise RolaqError(
            f"method {method.name} has {rotation.shape[0]} rotations, the model {len(layers)} MLA layers"
        )
