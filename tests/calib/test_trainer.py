"""One step and its gradients: recomputation, finite differences, falling loss, every option."""

import copy

import numpy as np
import pytest
import torch

from rolaq.calib.capture import capture_outputs, check_head, hidden_states, output_head
from rolaq.calib.recompute import decoder_layers, estimate_bytes, recompute
from rolaq.calib.trainer import METRICS, Trainer
from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.quantizer import group_statistics
from rolaq.quant.spec import QuantizerSpec


def tokens(rows=2, length=64, seed=0):
    return torch.randint(1, 4000, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model, student, config, ids):
    """Gradients of one step's loss, without the step."""
    trainer = Trainer(model, find_mla_layers(model), student, output_head(model), config)
    with torch.no_grad():
        teacher = trainer._states(ids)
    with attach(model, student.method()), recompute(trainer.recomputed):
        trainer._losses(trainer._states(ids), teacher)[0].backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def test_recomputation_changes_no_bit(model, make_student, make_config):
    student = make_student()
    off = gradients(model, copy.deepcopy(student), make_config(checkpointing="off"), tokens())
    on = gradients(model, copy.deepcopy(student), make_config(checkpointing="on"), tokens())
    assert off.keys() == on.keys() == {"rotation.generators", "threshold"}
    assert all(torch.equal(off[name], on[name]) for name in off)
    assert all(gradient.abs().sum() > 0 for gradient in off.values())


class Smoothed:
    """What the estimators are the exact gradient of: hard values at the start, smooth around it.

    `z + e + sigma (g(T) - g(T_0)) a(x) + sigma g(T_0) (s_T(x) - s_{T_0}(x))`, where the error e, sigma, x
    and the levels a are those of the first forward, and s_T is the level with a smoothed threshold.
    """

    name, exact, spec = "smoothed", False, QuantizerSpec()

    def __init__(self, student, width):
        self.student, self.width, self.start = student, width, {}

    def reconstruct(self, latent, layer, *, start=0, valid=None):
        parameters = self.student.method().parameters
        rotation, threshold, gain = (p[layer] for p in parameters)
        z = latent @ rotation
        if layer not in self.start:
            x, mean, sigma = (t.double() for t in group_statistics(z))
            rebuilt = self.student.method().reconstruct(latent, layer) @ rotation
            level = (rebuilt.unflatten(-1, x.shape[-2:]) - mean) / sigma / gain
            self.start[layer] = rebuilt - z, x, sigma, level, threshold.clone(), gain.clone()
        error, x, sigma, level, threshold0, gain0 = self.start[layer]
        change = (gain - gain0) * level + gain0 * (self.soft(x, threshold) - self.soft(x, threshold0))
        return (z + error + (sigma * change).flatten(-2)) @ rotation.mT

    def soft(self, x, threshold):
        share = torch.sigmoid((x.abs() - threshold) / self.width)
        return x.sign() * (self.spec.a_in + (self.spec.a_out - self.spec.a_in) * share)


@pytest.mark.parametrize("name", ["rotation.generators", "threshold"])
def test_gradients_through_the_model_are_those_of_the_smoothed_loss(model, make_student, make_config, name):
    """Central differences along the gradient; tolerance for the model's norms, which run in fp32."""
    model64, student, ids = copy.deepcopy(model).double(), make_student().double(), tokens()
    with torch.no_grad():
        student.rotation.generators.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        student.threshold.copy_(torch.tensor([0.9, 1.05]))
    config = make_config(checkpointing="off", attention_weight=1.0)
    ours = gradients(model64, student, config, ids)[name]
    trainer = Trainer(model64, find_mla_layers(model64), student, output_head(model64), config)
    smoothed, parameter, step = Smoothed(student, 0.1), dict(student.named_parameters())[name], 1e-3

    @torch.no_grad()
    def loss(shift):
        parameter.add_(shift * ours / ours.norm())
        with attach(model64, smoothed):
            value = trainer._losses(trainer._states(ids), teacher)[0].item()
        parameter.sub_(shift * ours / ours.norm())
        return value

    with torch.no_grad():
        teacher = trainer._states(ids)
    loss(0)  # the first forward fixes the constants
    numeric = (loss(step) - loss(-step)) / (2 * step)
    assert numeric == pytest.approx(ours.norm().item(), rel=5e-3)


@pytest.mark.parametrize("objective", ["kl", "attn", "both"])
def test_loss_falls(model, make_student, make_config, objective):
    config = make_config(steps=12, objective=objective, lr_rotation=2e-2, warmup=0.0)
    trainer = Trainer(model, find_mla_layers(model), make_student(), output_head(model), config)
    losses = [trainer.step(tokens(), step)[0].item() for step in range(12)]
    assert np.mean(losses[-3:]) < 0.97 * losses[0]


@pytest.mark.parametrize("rotation", ["joint", "contrast", "random", "full", "cayley", "fixed"])
def test_every_rotation_family_steps_and_stays_orthogonal(model, make_student, make_config, rotation):
    student = make_student(rotation=rotation)
    trainer = Trainer(model, find_mla_layers(model), student, output_head(model), make_config())
    metrics = [trainer.step(tokens(seed=step), step) for step in range(2)]
    assert len(metrics[0]) == len(METRICS)
    assert torch.isfinite(torch.stack(metrics)).all()
    product = student.export().rotation.mT @ student.export().rotation
    assert (product - torch.eye(128)).abs().max() < 1e-5


@pytest.mark.parametrize("rule", ["coupled", "free"])
def test_thresholds_stay_in_bounds_and_gain_follows_its_rule(model, make_student, make_config, rule):
    student = make_student(spec={"gain_rule": rule, "threshold_max": 0.99, "threshold_min": 0.97})
    config = make_config(lr_threshold=1.0, warmup=0.0)
    trainer = Trainer(model, find_mla_layers(model), student, output_head(model), config)
    trainer.step(tokens(), 0)
    exported = student.export()
    assert ((exported.threshold >= 0.97) & (exported.threshold <= 0.99)).all()
    assert (exported.threshold != 0.9810652732849121).all()
    if rule == "free":
        assert (exported.gain != 1.16).all()


def test_nothing_to_learn_is_said(model, make_student, make_config):
    with pytest.raises(RolaqError, match="nothing to learn"):
        Trainer(
            model,
            find_mla_layers(model),
            make_student(rotation="fixed", threshold="fixed"),
            output_head(model),
            make_config(),
        )


def test_weights_get_no_gradient_and_hooks_are_gone(model, make_student, make_config):
    ids = tokens()
    before = model(ids).logits
    trainer = Trainer(model, find_mla_layers(model), make_student(), output_head(model), make_config())
    trainer.step(ids, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(ids).logits, before)


def test_captured_outputs_are_those_after_the_output_projection(model, layers):
    ids = tokens()
    seen = []
    handle = layers[0].module.o_proj.register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad(), capture_outputs(layers, 5) as outputs:
        hidden_states(model, ids)
    handle.remove()
    assert torch.equal(outputs.all()[0], seen[0][:, 5:])


def test_a_model_that_changes_its_logits_is_refused(make_model):
    model = make_model()
    check_head(model, tokens(1, 16))
    forward = model.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits.tanh()
        return out

    model.forward = capped
    with pytest.raises(RolaqError, match="changes its logits"):
        check_head(model, tokens(1, 16))


def test_decoder_layers_are_found_once_each(model, layers):
    assert decoder_layers(model, layers) == list(model.model.layers)


@pytest.mark.parametrize(("linear", "square"), [(100, 0), (100, 3), (0, 2)])
def test_activation_estimate_is_exact_for_quadratic_growth(linear, square):
    estimate = estimate_bytes(lambda n: linear * n + square * n * n, 3, 1000)
    assert estimate == pytest.approx(3 * (linear * 1000 + square * 1000**2))
