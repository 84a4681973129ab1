"""OSCAR's fit against NumPy float64."""

import numpy as np
import torch
from reference import sylvester

from rolaq.calib.oscar import fit_oscar, latent_covariance
from rolaq.quant.adapters.layers import find_mla_layers


def latents_by_hand(model, ids):
    """Outputs of every layer's kv_a_layernorm, `[n, d]` float64."""
    kept = [[] for _ in find_mla_layers(model)]
    handles = [
        layer.module.kv_a_layernorm.register_forward_hook(
            lambda m, a, out, i=layer.index: kept[i].append(out)
        )
        for layer in find_mla_layers(model)
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return [torch.cat(values).flatten(0, -2).double().numpy() for values in kept]


def test_covariance_and_rotation_agree_with_numpy(model, layers):
    ids = torch.randint(1, 4000, (6, 100), generator=torch.Generator().manual_seed(0))
    statistics, rotations = (
        latent_covariance(model, layers, ids, batch_tokens=200),
        fit_oscar(model, layers, ids),
    )
    for index, latents in enumerate(latents_by_hand(model, ids)):
        sigma = latents.T @ latents / len(latents)
        np.testing.assert_allclose(statistics.covariance(index).numpy(), sigma, rtol=1e-4, atol=1e-6)
        assert statistics.tokens[index] == 600
        values = np.linalg.eigvalsh(sigma)[::-1]
        dealt = np.array([values[int(f"{column:07b}"[::-1], 2)] for column in range(128)])
        # eigenvectors are free in sign (and in the null space), so compare what the basis does to sigma
        unmixed = rotations[index].double().numpy() @ sylvester(128)
        np.testing.assert_allclose(unmixed.T @ sigma @ unmixed, np.diag(dealt), atol=2e-5 * values[0])
        np.testing.assert_allclose(unmixed.T @ unmixed, np.eye(128), atol=1e-5)


def test_the_fit_does_not_change_the_model(model, layers):
    ids = torch.arange(1, 65)[None]
    before = model(ids).logits
    fit_oscar(model, layers, ids)
    assert torch.equal(model(ids).logits, before)
