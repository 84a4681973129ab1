import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from rolaq.common.config import Config, DataConfig, ModelConfig, TrackingConfig, resolve
from rolaq.common.errors import RolaqError


class Job(Config):
    model: ModelConfig
    seed: int = 42


GOOD = {"model": {"name": "tiny", "path": "somewhere"}}


def job(**model):
    return OmegaConf.create({"model": {**GOOD["model"], **model}})


def test_resolve_follows_interpolations_and_freezes():
    cfg = OmegaConf.create({"seed": 7, "model": {"path": "a/b/Name", "name": "${basename:${model.path}}"}})
    resolved = resolve(cfg, Job)
    assert (resolved.model.name, resolved.seed) == ("Name", 7)
    with pytest.raises(ValidationError):
        resolved.seed = 8


@pytest.mark.parametrize(
    ("cfg", "model", "message"),
    [
        (job(path="???"), Job, "model.path is not set: give model.path=… on the command line"),
        (job(path="???").model, ModelConfig, "model.path is not set: give model.path=… on the command line"),
        (job(path="???", name="${model.path}"), Job, "model.path is not set"),
        (job(colour="red"), Job, "model.colour is not a known setting"),
        (job(colour="red").model, ModelConfig, "model.colour is not a known setting"),
        (job(dtype="int3"), Job, "model.dtype='int3': Input should be 'auto', 'float32', 'bfloat16' or"),
        (job(context="long"), Job, "model.context='long': Input should be a valid integer"),
        (job(name="${nowhere}"), Job, "cannot be resolved: Interpolation key 'nowhere' not found"),
        (OmegaConf.create({}), Job, "model is not set"),
        (OmegaConf.create({"mode": "loud"}), TrackingConfig, "mode='loud'"),
        (OmegaConf.create({"name": "x", "train": ["a"]}), DataConfig, "val is not set"),
    ],
)
def test_errors_name_field_and_value_on_one_line(cfg, model, message):
    with pytest.raises(RolaqError) as caught:
        resolve(cfg, model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_reported_together():
    with pytest.raises(RolaqError, match=r"model\.dtype.*; model\.context"):
        resolve(job(dtype="x", context="y"), Job)
