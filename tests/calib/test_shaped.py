"""Calibration with error feedback in the loop: the student, the choice of its basis, whole runs."""

import json

import pytest
import torch
from hydra import compose, initialize_config_module

from rolaq.calib import run
from rolaq.calib.capture import output_head
from rolaq.calib.config import FeedbackConfig, QuantConfig
from rolaq.calib.sensitivity import Statistics
from rolaq.calib.shaped import build_shaped, choose, make_basis
from rolaq.calib.trainer import Trainer
from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.artifact import Artifact
from rolaq.quant.geometry import energies
from rolaq.quant.hadamard import block_hadamard
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.spec import QuantizerSpec

SPEC = QuantizerSpec(feedback_block=16)


def calibrate(overrides, *more):
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        run.main(compose("calibrate", [*overrides, *more]))


def statistics(seed=0, layers=2, d=128):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, layers, d, d, generator=generator, dtype=torch.float64)
    sensitivity, covariance = factors @ factors.mT / d
    return Statistics(
        sensitivity, covariance, torch.randn(layers, d, generator=generator, dtype=torch.float64)
    )


def student(layers, eps=0.05, power=0.5, rotation="full", **feedback):
    config = QuantConfig(rotation=rotation, spec=SPEC, feedback=FeedbackConfig(**feedback))
    base = block_hadamard(128, 128).expand(2, -1, -1)
    basis = make_basis(statistics(), base, config.feedback, SPEC, eps, power)
    return build_shaped(config, basis, energies(layers))


@pytest.mark.parametrize("start", ["equalising", "hadamard", "oscar"])
@pytest.mark.parametrize("rotation", ["full", "joint", "fixed"])
def test_what_is_trained_is_what_is_exported(layers, rotation, start):
    made = student(layers, rotation=rotation, start=start)
    with torch.no_grad():
        for parameter in made.rotation_parameters():
            parameter.normal_(std=0.01, generator=torch.Generator().manual_seed(1))
    method = ShapedMethod("rolaq-feedback", made.export()._asdict(), SPEC)
    latent = torch.randn(2, 9, 128)
    exported, trained = method.quantize(latent, 1), made.method()
    codes = ShapedMethod("rolaq-feedback", trained.parameters._asdict(), SPEC).quantize(latent, 1)
    assert (exported.codes != codes.codes).float().mean() < 0.01  # fp32 and fp64 products
    torch.testing.assert_close(
        trained.reconstruct(latent, 1),
        ShapedMethod("x", trained.parameters._asdict(), SPEC).reconstruct(latent, 1),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_feedback_follows_the_rotation(layers):
    made = student(layers)
    before = made.method().parameters
    with torch.no_grad():
        made.rotation.generators.normal_(std=0.05)
    after = made.method().parameters
    assert not torch.equal(before.feedback, after.feedback)
    eye = torch.eye(128).expand(2, -1, -1)
    torch.testing.assert_close(after.rotation @ after.inverse, eye, rtol=0, atol=1e-4)


def test_a_step_trains_rotation_and_threshold(model, layers, make_config):
    made = student(layers)
    trainer = Trainer(model, layers, made, output_head(model), make_config(lr_rotation=0.02))
    start = {name: p.detach().clone() for name, p in made.named_parameters() if p.requires_grad}
    ids = torch.randint(1, 4000, (2, 64), generator=torch.Generator().manual_seed(0))
    losses = [trainer.step(ids, index)[0].item() for index in range(4)]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert {
        name for name, p in made.named_parameters() if name in start and not torch.equal(p, start[name])
    } == {
        "rotation.generators",
        "threshold",
    }


def test_centring_can_be_left_out(layers):
    assert student(layers, centre=False).mean.abs().max() == 0
    assert student(layers).mean.abs().max() > 0


def test_the_best_candidate_is_taken():
    scores = {(0.1, 0.0): 3.0, (0.1, 0.5): 2.0, (0.3, 0.0): 1.0, (0.3, 0.5): 4.0}

    class Fake:
        def __init__(self, key):
            self.key = key

        def method(self):
            return self.key

    config = FeedbackConfig(eps=(0.1, 0.3), whitening=(0.0, 0.5))
    best, tried = choose(lambda *key: Fake(key), config, scores.get)
    assert best.key == (0.3, 0.0)
    assert tried == [{"eps": e, "whitening": w, "kl": kl} for (e, w), kl in scores.items()]


def test_feedback_lowers_kl_of_the_trained_quantizer(model, layers):
    """On the toy model with its own Fisher matrix, against the same basis rounded to nearest."""
    from rolaq.calib.sensitivity import measure

    ids = torch.randint(1, 4000, (4, 64), generator=torch.Generator().manual_seed(3))
    found = measure(model, layers, output_head(model), [ids], "fisher", skip=4, chunk=64, seed=0)
    config = QuantConfig(spec=SPEC, feedback=FeedbackConfig(), rotation="full")
    base = block_hadamard(128, 128).expand(2, -1, -1)
    made = build_shaped(config, make_basis(found, base, config.feedback, SPEC, 0.05, 0.0), energies(layers))
    method = made.method()
    none = method.parameters._replace(feedback=torch.zeros_like(method.parameters.feedback))
    with torch.no_grad():
        teacher = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)

        def kl(method):
            with attach(model, method):
                logits = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            return float((teacher.exp() * (teacher - logits)).sum(-1).mean())

        assert kl(method) < 0.7 * kl(type(method)(none, SPEC))


def test_whole_run(overrides, tmp_path):
    more = ["quant=feedback", "quant.feedback.batches=2", "quant.feedback.eps=[0.1]", f"folder={tmp_path}"]
    calibrate(overrides, *more)
    artifact = Artifact.load(tmp_path / "rolaq-feedback")
    summary = json.loads((tmp_path / "calibration-feedback/summary.json").read_text())
    assert artifact.config.format_version == 2 and artifact.config.spec.feedback_block == 32
    assert artifact.config.selection["S"] == summary["S"] <= summary["S_start"]
    assert summary["eps"] == 0.1 and summary["whitening"] in (0.4, 0.6, 0.75, 0.9)
    assert "with error feedback" in (tmp_path / "rolaq-feedback/README.md").read_text()
    calibrate(overrides, f"folder={tmp_path}", "calib.steps=1")  # nearest rounding beside it
    assert Artifact.load(tmp_path / "rolaq").config.format_version == 1
    before = (tmp_path / "calibration-feedback/state.pt").stat().st_mtime_ns
    calibrate(overrides, *more)  # finished: nothing to do
    assert (tmp_path / "calibration-feedback/state.pt").stat().st_mtime_ns == before


@pytest.mark.parametrize("wrong", ["quant.feedback=null", "quant.spec.feedback_block=0"])
def test_feedback_and_its_block_belong_together(overrides, tmp_path, wrong):
    with pytest.raises(RolaqError, match="quant=feedback sets both"):
        calibrate(overrides, "quant=feedback", wrong, f"folder={tmp_path}")
