"""Saving, loading, refusing artifacts; OSCAR's own files."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.artifact import CONFIG_NAME, TENSORS_NAME, Artifact
from rolaq.quant.identity import model_identity, parameters_fingerprint
from rolaq.quant.metadata import ModelIdentity
from rolaq.quant.methods.grouped import hadamard_method, oscar_method
from rolaq.quant.oscar_files import export_rotations, import_rotations
from rolaq.quant.response import gain
from rolaq.quant.spec import QuantizerSpec

LAYERS, DIM = 3, 128
MODEL = ModelIdentity(
    name="m",
    architecture="DeepseekV2ForCausalLM",
    latent_dim=DIM,
    rope_dim=16,
    layers=LAYERS,
    weights="0" * 16,
)


def artifact(seed=42):
    torch.manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(LAYERS, DIM, DIM, dtype=torch.float64))[0]
    threshold = torch.tensor([0.9, 0.95, 1.0])
    tensors = {"rotation": rotation, "threshold": threshold, "gain": gain(threshold)}
    return Artifact.create("rolaq", MODEL, QuantizerSpec(), tensors, seed=seed, tokens=7)


def edit(folder, **changes):
    path = folder / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_round_trip(tmp_path):
    saved = artifact()
    saved.save(tmp_path / "a", extra={"README.md": "card", "figures/x.png": b"\x89PNG"})
    loaded = Artifact.load(tmp_path / "a", MODEL)
    assert loaded.config == saved.config and loaded.id == saved.id
    for name in ("rotation", "threshold", "gain"):
        assert torch.equal(getattr(loaded, name), getattr(saved, name))
    assert (tmp_path / "a" / "README.md").read_text() == "card"
    latent = torch.randn(1, 5, DIM)
    assert torch.equal(loaded.method().reconstruct(latent, 1), saved.method().reconstruct(latent, 1))


def test_saving_again_replaces_the_folder_whole(tmp_path):
    artifact(1).save(tmp_path / "a", extra={"old.txt": "x"})
    artifact(2).save(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([TENSORS_NAME, CONFIG_NAME])
    assert not (tmp_path / "a" / "old.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert Artifact.load(tmp_path / "a").id == artifact(2).id


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_not_an_artifact_is_never_replaced(tmp_path, what):
    target = tmp_path / "rolaq"
    if what == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("precious")
    else:
        target.write_text("precious")
    with pytest.raises(RolaqError, match="would be replaced"):
        artifact().save(target)
    assert "precious" in (target / "thesis.txt" if what == "folder" else target).read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["rolaq"]


def test_savers_and_readers_at_once(tmp_path):
    first, second = artifact(1), artifact(2)
    first.save(tmp_path / "a")
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(each.save, tmp_path / "a") for each in (first, second) * 6]
        loads = [pool.submit(Artifact.load, tmp_path / "a", MODEL) for _ in range(24)]
    assert all(save.exception() is None for save in saves)
    assert {load.result().id for load in loads} <= {first.id, second.id}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


CHANGES = [
    ("architecture", "DeepseekV3ForCausalLM"),
    ("latent_dim", 256),
    ("rope_dim", 32),
    ("layers", 4),
    ("weights", "f" * 16),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_another_model_is_refused_by_field_and_both_values(tmp_path, field, value):
    artifact().save(tmp_path / "a")
    with pytest.raises(RolaqError) as error:
        Artifact.load(tmp_path / "a", MODEL.model_copy(update={field: value}))
    message = str(error.value)
    assert field in message and str(value) in message and str(getattr(MODEL, field)) in message
    assert "\n" not in message


DAMAGE = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()], "make calibrate"),
    "no tensors": (lambda f: (f / TENSORS_NAME).unlink(), TENSORS_NAME),
    "a flipped byte": (lambda f: _flip(f / TENSORS_NAME), "tensors_sha256"),
    "truncated": (
        lambda f: (f / TENSORS_NAME).write_bytes((f / TENSORS_NAME).read_bytes()[:500]),
        "tensors_sha256",
    ),
    "config not JSON": (lambda f: (f / CONFIG_NAME).write_text("{"), "damaged"),
    "config a list": (lambda f: (f / CONFIG_NAME).write_text("[]"), "format_version is None"),
    "other format": (lambda f: edit(f, format_version=3), "format_version is 3, this release reads 1 and 2"),
    "unknown field": (lambda f: edit(f, extra=1), "extra"),
    "T in config moved": (
        lambda f: edit(f, threshold=[0.9, 0.95, 1.1]),
        "threshold of layer 2 is 1, the config lists 1.1",
    ),
    "another grid": (
        lambda f: edit(f, spec={**artifact().config.spec.model_dump(), "sigma_eps": 1e-4}),
        "checksum",
    ),
    "another seed": (lambda f: edit(f, seed=7), "checksum"),
    "too few T": (lambda f: edit(f, threshold=[0.9]), "threshold"),
}


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_line(tmp_path, kind):
    artifact().save(tmp_path / "a")
    damage, expected = DAMAGE[kind]
    damage(tmp_path / "a")
    with pytest.raises(RolaqError) as error:
        Artifact.load(tmp_path / "a")
    assert expected in str(error.value) and "\n" not in str(error.value)


BAD_TENSORS = {
    "rotation shape": ({"rotation": torch.eye(DIM).expand(2, -1, -1)}, "rotation has shape"),
    "not orthogonal": ({"rotation": 1.01 * torch.eye(DIM).expand(LAYERS, -1, -1)}, "not orthogonal"),
    "NaN": ({"rotation": torch.full((LAYERS, DIM, DIM), torch.nan)}, "not finite"),
    "T too low": ({"threshold": torch.tensor([0.9, 0.4, 0.9])}, r"threshold 0.4 of layer 1"),
    "gain apart": ({"gain": torch.tensor([1.0, 1.1, 1.1])}, "1/C(T)"),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensors_never_become_an_artifact(kind):
    good = artifact()
    tensors = {"rotation": good.rotation, "threshold": good.threshold, "gain": good.gain}
    change, expected = BAD_TENSORS[kind]
    with pytest.raises(RolaqError) as error:
        Artifact.create("rolaq", MODEL, QuantizerSpec(), {**tensors, **change})
    assert expected in str(error.value)


def test_rehashed_foreign_tensors_are_still_verified(tmp_path):
    """A consistent hash does not excuse tensors of the wrong shape."""
    import hashlib

    artifact().save(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / TENSORS_NAME)
    save_file({**tensors, "rotation": tensors["rotation"][:2]}, tmp_path / "a" / TENSORS_NAME)
    edit(
        tmp_path / "a",
        tensors_sha256=hashlib.sha256((tmp_path / "a" / TENSORS_NAME).read_bytes()).hexdigest(),
    )
    with pytest.raises(RolaqError, match="rotation has shape"):
        Artifact.load(tmp_path / "a")


def test_oscar_files_round_trip(tmp_path):
    rotation = artifact().rotation
    export_rotations(rotation, tmp_path)
    assert torch.equal(import_rotations(tmp_path), rotation)
    bare = torch.load(tmp_path / "layer_1.pt", weights_only=True)
    assert bare.dtype == torch.float32 and torch.equal(bare, rotation[1])


BAD_FOLDERS = {
    "empty": (lambda p: None, "layer_0.pt"),
    "a gap": (lambda p: torch.save(torch.eye(4), p / "layer_1.pt"), "without gaps"),
    "not a matrix": (lambda p: torch.save(torch.ones(4), p / "layer_0.pt"), "square"),
    "not a tensor": (lambda p: torch.save({"a": 1}, p / "layer_0.pt"), "bare tensor"),
    "garbage": (lambda p: (p / "layer_0.pt").write_bytes(b"no"), "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_bad_oscar_folders(tmp_path, kind):
    make, expected = BAD_FOLDERS[kind]
    make(tmp_path)
    with pytest.raises(RolaqError, match=expected):
        import_rotations(tmp_path)


def layer(seed, latent_dim=DIM):
    torch.manual_seed(seed)
    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(latent_dim, 24, bias=False)
    return MLALayer("layer", module, 0, latent_dim, 16, 2, 6, 6)


def test_identity_depends_on_weights_not_on_name_or_dtype():
    config = SimpleNamespace(architectures=["DeepseekV2ForCausalLM"])
    layers = [layer(0), layer(1)]
    for each in layers:
        each.module.bfloat16()
    here = model_identity(layers, config, "here")
    for each in layers:
        each.module.float()
    there = model_identity(layers, config, "/elsewhere")
    assert here.weights == there.weights != model_identity([layer(0), layer(2)], config, "here").weights
    with pytest.raises(RolaqError, match="different"):
        model_identity([layer(0), layer(1, 256)], config, "mixed")


def test_reference_methods():
    spec = QuantizerSpec()
    oscar = oscar_method(artifact().rotation)
    assert oscar.gain.tolist() == pytest.approx([1.16] * LAYERS)
    assert oscar.with_gain(1.069, "oscar-best-gain").gain.tolist() == pytest.approx([1.069] * LAYERS)
    plain = hadamard_method(LAYERS, DIM)
    assert plain.gain.tolist() == pytest.approx([gain(spec.threshold_init)] * LAYERS)
    assert torch.equal(plain.rotation[0], plain.rotation[0].T)


def test_parameters_fingerprint_sees_any_layer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 4), torch.nn.Linear(4, 2))
    before = parameters_fingerprint(model)
    assert parameters_fingerprint(model) == before
    with torch.no_grad():
        model[1].bias += 1
    assert parameters_fingerprint(model) != before
