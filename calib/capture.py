"""What calibration reads from the frozen model: states before the output embedding, attention outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from rolaq.calib.losses import Head
from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.layers import MLALayer


@contextmanager
def without_head(model: PreTrainedModel) -> Iterator[None]:
    """Within it `model(ids).logits` are the output embedding's inputs `[B, n, hidden]`, not its outputs.

    Whatever a model does to its hidden states before the output embedding (final norm, MiniCPM3's
    scaling) is thereby kept.
    """
    module = model.get_output_embeddings()
    before = module.__dict__.get("forward")
    module.forward = _identity
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def output_head(model: PreTrainedModel) -> Head:
    """The model's output embedding in fp32 (fp64 stays fp64)."""
    module = model.get_output_embeddings()
    precision = torch.promote_types(module.weight.dtype, torch.float32)
    bias = getattr(module, "bias", None)
    return Head(module.weight.detach().to(precision), None if bias is None else bias.detach().to(precision))


def hidden_states(model: PreTrainedModel, ids: Tensor, skip: int = 0) -> Tensor:
    """Output-embedding inputs `[B * (n - skip), hidden]` of `ids [B, n]` at the positions from `skip` on."""
    with without_head(model):
        hidden = model(input_ids=ids, use_cache=False).logits
    return hidden[:, skip:].flatten(0, 1)


@torch.no_grad()
def check_head(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise `RolaqError` if the model changes its logits after the output embedding (e.g. soft-capping).

    ids `[1, n]`: a few tokens suffice.
    """
    logits = model(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
    head = output_head(model)
    expected = F.linear(hidden_states(model, ids).to(head.weight.dtype), head.weight, head.bias)
    error = float((logits - expected).norm() / expected.norm())
    if not error < 0.02:  # BF16 logits differ from fp32 ones by up to 2^-8
        raise RolaqError(
            f"{type(model).__name__} changes its logits after the output embedding (relative difference "
            f"{error:.3g}); calibration computes its loss from the output embedding and cannot use this model"
        )


class Outputs:
    """Attention outputs after W_O, one tensor `[B, n - skip, hidden]` per layer, in layer order."""

    def __init__(self, layers: int, skip: int) -> None:
        self.skip = skip
        self.values: list[Tensor | None] = [None] * layers

    def take(self, layer: int, output: Any) -> None:
        """Keep the first output seen for `layer`; a recomputation during backward is ignored."""
        if self.values[layer] is None:
            value = output[0] if isinstance(output, tuple) else output
            self.values[layer] = value[:, self.skip :]

    def all(self) -> list[Tensor]:
        """Every layer's output; `RolaqError` names the first layer that did not run."""
        missing = [index for index, value in enumerate(self.values) if value is None]
        if missing:
            raise RolaqError(f"attention layer {missing[0]} produced no output during the forward pass")
        return [value for value in self.values if value is not None]


@contextmanager
def capture_outputs(layers: Sequence[MLALayer], skip: int) -> Iterator[Outputs]:
    """Record each attention module's output at the positions from `skip` on, during one forward pass."""
    outputs = Outputs(len(layers), skip)

    def hook(layer: MLALayer) -> Any:
        return lambda module, args, output: outputs.take(layer.index, output)

    handles = [layer.module.register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
