"""Which artifacts are used, and what an unfit one says."""

import shutil

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.eval.energy import profiles
from rolaq.eval.methods import METHODS, Calibrated, build, load_artifacts, tensors_id
from rolaq.quant.artifact import Artifact
from rolaq.quant.spec import QuantizerSpec

from .conftest import load, make_artifacts


def find(target, workspace, **options):
    cfg = load(workspace)[0].model_copy(update={"artifact": options.pop("shipped", None)})
    options.setdefault("artifacts", str(workspace / "artifacts"))
    return load_artifacts(list(METHODS), target, cfg, **options)


def test_own_artifacts_come_before_shipped_ones(target, workspace, tmp_path):
    make_artifacts(tmp_path / "shipped", target.identity)
    shutil.copytree(workspace / "artifacts" / "model" / "rolaq", tmp_path / "own" / "model" / "rolaq")
    found = find(target, workspace, shipped=str(tmp_path / "shipped"), artifacts=str(tmp_path / "own"))
    folders = {kind: calibrated.folder for kind, calibrated in found.items()}
    assert folders == {
        "oscar": str(tmp_path / "shipped" / "oscar"),
        "rolaq": str(tmp_path / "own" / "model" / "rolaq"),
        "rolaq-feedback": str(tmp_path / "shipped" / "rolaq-feedback"),
    }


@pytest.mark.parametrize("part", ["", "rolaq", "rolaq-feedback"])
def test_an_artifact_or_a_folder_of_them_can_be_named(target, workspace, part):
    folder = workspace / "artifacts" / "model" / part
    found = find(target, workspace, artifact=str(folder), artifacts="/nowhere")
    assert {kind: item.artifact.config.method for kind, item in found.items()} == {
        kind: kind for kind in ("oscar", "rolaq", "rolaq-feedback")
    }


def test_missing_artifact_says_what_to_do(target, workspace, tmp_path):
    with pytest.raises(
        RolaqError, match=r"no oscar artifact for model .*: run `make calibrate MODEL=model` first"
    ):
        find(target, workspace, artifacts=str(tmp_path))


def test_artifact_of_another_model_is_refused(target, workspace, tmp_path):
    other = target.identity.model_copy(update={"weights": "0" * 16, "name": "other"})
    make_artifacts(tmp_path / "model", other)
    with pytest.raises(RolaqError, match="belongs to another model: weights is 0000000000000000"):
        find(target, workspace, artifacts=str(tmp_path))


def test_methods_in_order_with_their_bytes(target, workspace):
    entries = build(list(METHODS), target, find(target, workspace), best_gain=1.069)
    assert [entry.name for entry in entries] == list(METHODS)
    sizes = {entry.name: entry.bytes_per_token for entry in entries}
    row = QuantizerSpec().bytes_per_token(128, 16)
    assert sizes["bf16"] == 2 * (128 + 16) and sizes["kvarn"] == row + 4
    assert {sizes[name] for name in METHODS if name not in ("bf16", "kvarn")} == {row}
    assert len({entry.id for entry in entries}) == len(entries)
    assert {entry.name: entry.seed for entry in entries if entry.seed is not None} == {
        "rolaq": 42,
        "rolaq-feedback": 43,
    }


def test_best_gain_changes_the_gain_alone(target, workspace):
    entries = {
        e.name: e.method for e in build(list(METHODS), target, find(target, workspace), best_gain=1.069)
    }
    oscar, best = entries["oscar"], entries["oscar-best-gain"]
    assert torch.equal(oscar.rotation, best.rotation) and torch.equal(oscar.threshold, best.threshold)
    assert best.gain.tolist() == pytest.approx([1.069, 1.069]) and oscar.gain.tolist() == pytest.approx(
        [1.16, 1.16]
    )


def test_identity_follows_the_tensors(target, workspace, tmp_path):
    found = find(target, workspace)
    first = {entry.name: entry.id for entry in build(list(METHODS), target, found, 1.1)}
    other = {entry.name: entry.id for entry in build(list(METHODS), target, found, 1.2)}
    assert [name for name in METHODS if first[name] != other[name]] == ["oscar-best-gain"]


def test_identity_follows_the_feedback(target, workspace):
    found = find(target, workspace)
    source = found["rolaq-feedback"].artifact
    first = build(["rolaq-feedback"], target, found)[0]
    changed = {**source.tensors, "mean": source.tensors["mean"] + 0.1}
    artifact = Artifact.create("rolaq-feedback", target.identity, source.config.spec, changed)
    other = build(["rolaq-feedback"], target, {"rolaq-feedback": Calibrated(artifact, "")})[0]
    assert first.id != other.id and tensors_id(first.method) != tensors_id(other.method)


def test_energy_profile(target):
    curves = profiles(target.layers)
    assert curves.shape == (2, 2, 128)
    torch.testing.assert_close(curves[..., -1], torch.ones(2, 2, dtype=torch.float64))
    assert (curves.diff(dim=-1) >= -1e-12).all()
    # an independent computation for the first layer: a basis by SVD of the stacked, normalised projections
    weight = target.layers[0].module.kv_b_proj.weight.double().view(2, 32, 128)
    parts = [weight[:, :16].reshape(-1, 128), weight[:, 16:].reshape(-1, 128)]
    stacked = torch.cat([part / part.norm() for part in parts])
    basis = torch.linalg.svd(stacked)[2].T
    for index, part in enumerate(parts):
        share = ((part @ basis).square().sum(0) / part.square().sum()).cumsum(0)
        torch.testing.assert_close(curves[0, index], share, rtol=1e-8, atol=1e-10)


def test_damaged_artifact(target, workspace, tmp_path):
    shutil.copytree(workspace / "artifacts" / "model", tmp_path / "model")
    path = tmp_path / "model" / "oscar" / "rolaq.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(RolaqError, match="is damaged"):
        find(target, workspace, artifacts=str(tmp_path))
    assert Artifact.load(tmp_path / "model" / "rolaq", target.identity)
