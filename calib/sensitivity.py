"""What errors of a layer's latents cost, `M [L, d, d]`, with the latents' own mean and covariance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolaq.calib.capture import hidden_states
from rolaq.calib.losses import Head
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.geometry import energies

Kind = Literal["fisher", "attention", "weights"]


@dataclass
class Statistics:
    """Per layer, fp64 on the model's device: sensitivity and centred covariance `[L, d, d]`, mean `[L, d]`."""

    sensitivity: Tensor
    covariance: Tensor
    mean: Tensor


class Probe:
    """A method that changes nothing and sums each latent's moments and its gradient's, in fp64.

    local: a latent's gradient stops there, so that every layer is seen by itself.
    """

    name = "probe"
    exact = False

    def __init__(self, layers: Sequence[MLALayer], local: bool) -> None:
        self.local = local
        self.sums = [_Sums(layer) for layer in layers]

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`latent [B, n, d]` itself, watched; the first layer's has no gradient of its own."""
        if self.local or not latent.requires_grad:
            latent = latent.detach().requires_grad_()
        sums = self.sums[layer]
        sums.add(latent.detach())
        latent.register_hook(sums.add_gradient)
        return latent

    def statistics(self) -> Statistics:
        """Averages over all tokens seen."""
        return Statistics(
            *(torch.stack(parts) for parts in zip(*(s.means() for s in self.sums), strict=True))
        )


class _Sums:
    def __init__(self, layer: MLALayer) -> None:
        device, d = next(layer.module.parameters()).device, layer.latent_dim
        self.gradient, self.second = (torch.zeros(d, d, dtype=torch.float64, device=device) for _ in range(2))
        self.first, self.tokens = torch.zeros(d, dtype=torch.float64, device=device), 0

    def add(self, latent: Tensor) -> None:
        rows = latent.flatten(0, -2).double()
        self.second += rows.T @ rows
        self.first += rows.sum(0)
        self.tokens += rows.shape[0]

    def add_gradient(self, gradient: Tensor) -> None:
        rows = gradient.flatten(0, -2).double()
        self.gradient += rows.T @ rows

    def means(self) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.first / self.tokens
        return self.gradient / self.tokens, self.second / self.tokens - torch.outer(mean, mean), mean


def measure(
    model: PreTrainedModel,
    layers: Sequence[MLALayer],
    head: Head,
    texts: Sequence[Tensor],
    kind: Kind,
    *,
    skip: int,
    chunk: int,
    seed: int,
) -> Statistics:
    """Sensitivity and moments from `texts`, batches of token ids `[B, n]` on the model's device.

    - fisher: `E[g^T g]`, g the latent's gradient of `log p(y)`, y drawn from the model's prediction at
      every position from `skip` on: the second-order term of KL.
    - attention: `E[J^T J]`, J the Jacobian of the layer's attention output after W_O at the positions
      from `skip` on, through random signs: what each query reads, weighted as it attends.
    - weights: `H_K + H_V`, which needs no text; only mean and covariance come from it.
    """
    probe = Probe(layers, local=kind == "attention")
    draw = torch.Generator(texts[0].device).manual_seed(seed)
    with attach(model, probe):
        for ids in texts:
            if kind == "attention":
                _output_gradients(model, layers, ids, skip, draw)
            else:
                hidden = hidden_states(model, ids, skip)
                if kind == "fisher":
                    hidden.backward(_label_gradients(hidden.detach(), head, chunk, draw))
    found = probe.statistics()
    if kind == "weights":
        found.sensitivity = energies(layers).sum(1).to(found.mean.device)
    return found


def _label_gradients(hidden: Tensor, head: Head, chunk: int, draw: torch.Generator) -> Tensor:
    """Gradient of `sum log p(y)` to `hidden [n, hidden]`: `(onehot(y) - p) W` for drawn labels y."""
    parts = []
    for part in hidden.split(chunk):
        p = head.log_probabilities(part).exp()
        label = torch.multinomial(p, 1, generator=draw)
        parts.append((torch.zeros_like(p).scatter_(1, label, 1.0) - p) @ head.weight)
    return torch.cat(parts).to(hidden.dtype)


def _output_gradients(
    model: PreTrainedModel, layers: Sequence[MLALayer], ids: Tensor, skip: int, draw: torch.Generator
) -> None:
    """Send random signs back from every attention output to its own layer's latents."""
    with _separate_outputs(layers) as outputs:
        hidden_states(model, ids)
    for output in outputs:
        signs = torch.randint(0, 2, output.shape, generator=draw, device=ids.device).to(output)
        signs[:, :skip] = 0.5
        output.backward(2 * signs - 1)


@contextmanager
def _separate_outputs(layers: Sequence[MLALayer]) -> Iterator[list[Tensor]]:
    """Collect attention outputs `[B, n, hidden]` in layer order and pass them on without their gradients."""
    collected: list[Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        collected.append(first)
        return (first.detach(), *output[1:]) if isinstance(output, tuple) else first.detach()

    handles = [layer.module.register_forward_hook(hook) for layer in layers]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
