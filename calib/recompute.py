"""Activation checkpointing per decoder layer, and the estimate that decides whether it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rolaq.quant.adapters.layers import MLALayer

MEMORY_SHARE = 0.6
PROBE_TOKENS = (64, 128)


def decoder_layers(model: nn.Module, layers: Sequence[MLALayer]) -> list[nn.Module]:
    """The modules around the attention modules, each once: what is recomputed as a whole."""
    found: dict[str, nn.Module] = {}
    for layer in layers:
        name = layer.name.rpartition(".")[0]
        while isinstance(model.get_submodule(name), nn.ModuleList):
            name = name.rpartition(".")[0]
        found[name] = model.get_submodule(name)
    return list(found.values())


@contextmanager
def recompute(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within it the modules keep only their inputs for backward and run again there.

    Hooks on or inside the modules run again too, so whatever they do must be a function of their
    inputs; the backward pass has to take place within the context.
    """
    originals = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            del module.forward
            if original is not None:
                module.forward = original


def saved_bytes(forward: Callable[[], Tensor], exclude: Sequence[Tensor]) -> int:
    """Bytes autograd keeps for the backward pass of `forward()`, each storage once, `exclude` left out."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values())


def estimate_bytes(measure: Callable[[int], int], sequences: int, length: int) -> float:
    """Activation bytes of `sequences` x `length` tokens, from `measure(n)` of two short sequences.

    Attention without a fused kernel keeps n x n weights: the fit is `a n + b n^2` for each sequence.
    """
    (n1, n2), (m1, m2) = PROBE_TOKENS, (measure(n) for n in PROBE_TOKENS)
    square = max(0.0, (m2 / n2 - m1 / n1) / (n2 - n1))
    linear = m2 / n2 - square * n2
    return sequences * (linear * length + square * length**2)


def free_bytes(device: torch.device) -> float:
    """Memory that a step may still take on `device`; infinite where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return float("inf")
