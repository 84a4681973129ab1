"""Sensitivities against Jacobians taken one output at a time, and moments against NumPy."""

import numpy as np
import pytest
import torch

from rolaq.calib.capture import hidden_states, output_head
from rolaq.calib.sensitivity import measure
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.geometry import energies

SKIP = 2


def tokens(rows=1, length=6, seed=0):
    return torch.randint(1, 4000, (rows, length), generator=torch.Generator().manual_seed(seed))


class Nudge:
    """A method that adds a leaf to one layer's latents, to differentiate by."""

    name, exact = "nudge", False

    def __init__(self, layer):
        self.layer, self.leaf, self.seen = layer, None, None

    def reconstruct(self, latent, layer, *, start=0, valid=None):
        if layer != self.layer:
            return latent
        self.seen, self.leaf = latent.detach(), torch.zeros_like(latent, requires_grad=True)
        return latent + self.leaf


def run(model, layers, texts, kind, seed=0):
    return measure(model, layers, output_head(model), texts, kind, skip=SKIP, chunk=3, seed=seed)


@pytest.mark.parametrize("layer", [0, 1])
def test_fisher_is_the_expected_outer_product(model, layers, layer):
    """The exact expectation over labels, from the Jacobian; drawn labels approach it."""
    ids, weight = tokens(), output_head(model).weight
    nudge, expected = Nudge(layer), torch.zeros(128, 128, dtype=torch.float64)
    with attach(model, nudge):
        for row in hidden_states(model, ids, SKIP):
            # E of the outer product of (onehot(y) - p) W, factored into directions of the hidden state
            p = (weight @ row.detach()).softmax(-1)
            fisher = weight.T @ (torch.diag(p) - torch.outer(p, p)) @ weight
            values, vectors = torch.linalg.eigh(fisher.double())
            for direction in (vectors * values.clamp_min(0).sqrt()).T.float():
                (grad,) = torch.autograd.grad(row, nudge.leaf, direction, retain_graph=True)
                expected += grad[0].double().T @ grad[0].double()
    drawn = run(model, layers, [ids.expand(16, -1)] * 12, "fisher").sensitivity[layer] * ids.numel()
    # positions draw their labels apart, so that products of different positions average out
    assert torch.nn.functional.cosine_similarity(drawn.flatten(), expected.flatten(), dim=0) > 0.97
    assert drawn.trace() == pytest.approx(expected.trace().item(), rel=0.25)


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_the_outputs_own_jacobian(model, layers, layer):
    ids, nudge, expected = tokens(length=4), Nudge(layer), torch.zeros(128, 128, dtype=torch.float64)
    kept = []
    handle = layers[layer].module.register_forward_hook(lambda module, args, output: kept.append(output[0]))
    with attach(model, nudge):
        model(input_ids=ids, use_cache=False)
        handle.remove()
        for value in kept[0][0, SKIP:].flatten():
            (grad,) = torch.autograd.grad(value, nudge.leaf, retain_graph=True)
            expected += grad[0].double().T @ grad[0].double()
    drawn = run(model, layers, [ids.expand(64, -1)] * 8, "attention").sensitivity[layer] * ids.numel()
    assert torch.nn.functional.cosine_similarity(drawn.flatten(), expected.flatten(), dim=0) > 0.97
    assert drawn.trace() == pytest.approx(expected.trace().item(), rel=0.1)


def test_weights_need_no_gradient(model, layers):
    found = run(model, layers, [tokens()], "weights")
    torch.testing.assert_close(found.sensitivity, energies(layers).sum(1))


@pytest.mark.parametrize("kind", ["fisher", "attention"])
def test_moments_and_repetition(model, layers, kind):
    texts = [tokens(2, 8, 1), tokens(1, 16, 2)]
    found, again, other = (run(model, layers, texts, kind, seed) for seed in (0, 0, 1))
    seen = []
    for ids in texts:
        nudge = Nudge(1)
        with torch.no_grad(), attach(model, nudge):
            model(input_ids=ids, use_cache=False)
        seen.append(nudge.seen.flatten(0, 1).double().numpy())
    rows = np.concatenate(seen)
    np.testing.assert_allclose(found.mean[1].numpy(), rows.mean(0), atol=1e-6)
    np.testing.assert_allclose(found.covariance[1].numpy(), np.cov(rows.T, bias=True), atol=1e-5)
    assert torch.equal(found.sensitivity, again.sensitivity)
    assert not torch.equal(found.sensitivity, other.sensitivity)
    assert not any(layer.module._forward_hooks for layer in find_mla_layers(model))
