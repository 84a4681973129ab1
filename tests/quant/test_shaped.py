"""Methods with error feedback: their latents, artifact, folding and names."""

import copy

import pytest
import torch
from test_artifact import DIM, LAYERS, MODEL, artifact, edit
from test_shaping import sensitivity
from tiny_models import tiny, tokens

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.layers import find_mla_layers
from rolaq.quant.artifact import Artifact
from rolaq.quant.folding import fold, value_bias
from rolaq.quant.geometry import energies
from rolaq.quant.methods import build_method
from rolaq.quant.methods.shaped import ShapedMethod, orthogonal_tensors
from rolaq.quant.quantizer import decode
from rolaq.quant.shaping import equalising_rotation, regularise
from rolaq.quant.spec import QuantizerSpec

SPEC = QuantizerSpec(feedback_block=16)


def tensors(layers=LAYERS, seed=0):
    """Write matrices that are not orthogonal, and a mean."""
    m = regularise(torch.stack([sensitivity(DIM, seed + i) for i in range(layers)]), 0.1)
    rotation = torch.stack([equalising_rotation(each, 16) for each in m])
    made = orthogonal_tensors(rotation, m, SPEC)
    generator = torch.Generator().manual_seed(seed)
    stretch = torch.rand(layers, 1, DIM, generator=generator) + 0.5
    made["rotation"] = made["rotation"] * stretch
    made["inverse"] = made["inverse"] / stretch.mT
    made["mean"] = torch.randn(layers, DIM, generator=generator)
    return made


def test_latents_are_centred_written_and_restored():
    method = ShapedMethod("rolaq-feedback", tensors(), SPEC)
    latent = 0.1 * torch.randn(2, 6, DIM) + method.mean[1]
    z = (latent.double() - method.mean[1].double()) @ method.rotation[1].double()
    codes = method.quantize(latent, 1)
    error = (decode(codes).double() - z).norm() / z.norm()
    assert 0.2 < error < 0.9  # two bits, with errors moved where they do not matter
    restored = decode(codes).double() @ method.inverse[1].double() + method.mean[1].double()
    torch.testing.assert_close(method.reconstruct(latent, 1).double(), restored, rtol=1e-4, atol=1e-5)
    assert method.reconstruct(latent.bfloat16(), 1).dtype == torch.bfloat16


def test_artifact_of_format_two(tmp_path):
    made = Artifact.create("rolaq-feedback", MODEL, SPEC, tensors(), seed=1)
    made.save(tmp_path / "a")
    loaded = Artifact.load(tmp_path / "a", MODEL)
    assert loaded.config == made.config and loaded.config.format_version == 2
    latent = torch.randn(1, 5, DIM)
    expected = ShapedMethod("rolaq-feedback", tensors(), SPEC).reconstruct(latent, 2)
    assert torch.equal(loaded.method().reconstruct(latent, 2), expected)
    with pytest.raises(RolaqError, match="no rotation to fold and write with"):
        loaded.rotation  # noqa: B018
    method = build_method("rolaq-feedback", artifact=loaded, d=DIM, layers=LAYERS)
    assert torch.equal(method.reconstruct(latent, 2), expected)


def test_artifacts_of_format_one_do_not_change(tmp_path):
    made = artifact()
    assert made.config.format_version == 1 and set(made.tensors) == {"rotation", "threshold", "gain"}
    assert "feedback" not in made.config.model_dump_json()


BAD = {
    "not the inverse": (
        {"inverse": torch.eye(DIM).expand(LAYERS, -1, -1)},
        SPEC,
        "not undone by its inverse",
    ),
    "no block": ({}, QuantizerSpec(), "feedback_block is 0"),
    "later weights": ({"feedback": torch.ones(LAYERS, DIM, DIM)}, SPEC, "later blocks"),
    "negative unit": ({"feedback_unit": torch.full((LAYERS, DIM), -1.0)}, SPEC, "must not be negative"),
    "mean's shape": ({"mean": torch.zeros(DIM)}, SPEC, "mean has shape"),
    "gain apart": ({"gain": torch.tensor([1.0, 1.1, 1.1])}, SPEC, "1/C(T)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_tensors_are_one_line(kind):
    change, spec, expected = BAD[kind]
    with pytest.raises(RolaqError) as error:
        Artifact.create("rolaq-feedback", MODEL, spec, {**tensors(), **change})
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_another_method_in_its_place_is_refused(tmp_path):
    Artifact.create("rolaq-feedback", MODEL, SPEC, tensors()).save(tmp_path / "a")
    edit(tmp_path / "a", method="rolaq")
    with pytest.raises(RolaqError, match="not orthogonal"):
        Artifact.load(tmp_path / "a")


def test_method_needs_a_block():
    with pytest.raises(RolaqError, match="needs a spec with feedback_block"):
        ShapedMethod("x", tensors(), QuantizerSpec())


@pytest.mark.parametrize("kind", ["deepseek_v2", "minicpm3"])
def test_folded_attention_needs_neither_the_inverse_nor_the_mean(kind):
    """z_hat through `W P^{-T}`, the mean only as a constant on each head's value: the same outputs."""
    model, ids = tiny(kind), tokens(2, 40)
    layers = find_mla_layers(model)
    method = ShapedMethod("rolaq-feedback", tensors(len(layers)), SPEC)
    folded = copy.deepcopy(model)
    for layer in find_mla_layers(folded):
        projection = layer.module.kv_b_proj
        bias = torch.cat(
            (torch.zeros(layer.heads, layer.nope_dim), value_bias(layer, method.mean[layer.index])), 1
        )
        projection.weight.data = fold(projection.weight.data, method.read_matrix[layer.index])
        projection.bias = torch.nn.Parameter(bias.flatten())

        def written(module, args, layer=layer):
            return (decode(method.quantize(args[0], layer.index)).to(args[0].dtype),)

        projection.register_forward_pre_hook(written)
    with torch.no_grad():
        got = folded(ids, use_cache=False, output_hidden_states=True).hidden_states
        with attach(model, method):
            expected = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["hadamard-feedback", "weights-feedback"])
def test_methods_from_weights_alone(name):
    model = tiny("deepseek_v2")
    found = energies(find_mla_layers(model))
    method = build_method(name, d=DIM, layers=len(found), energies=found)
    latent = torch.randn(1, 300, DIM, generator=torch.Generator().manual_seed(0))
    nearest = build_method("hadamard", d=DIM, layers=len(found))

    def damage(method):
        error = (method.reconstruct(latent, 0) - latent)[0].double()
        return float(((error @ found[0].sum(0)) * error).sum())

    assert damage(method) < damage(nearest)
    assert method.name == name and method.spec.bytes_per_token(DIM, 16) == nearest.spec.bytes_per_token(
        DIM, 16
    )
