"""Every configuration composes, resolves and fits the models that read it."""

from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rolaq.common.config import DataConfig, ModelConfig, TrackingConfig, resolve

CONF = Path(__file__).parents[1] / "conf"
COMMANDS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
# what a command line must give where it is not set, and the model that reads the group
NEEDED = {"model": "model.path=owner/name", "data": "data.root=somewhere"}
READERS = {"model": ModelConfig, "data": DataConfig, "tracking": TrackingConfig}


def composed(command, *overrides, hydra=False):
    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        return compose(command, list(overrides), return_hydra_config=hydra)


@cache
def groups(command):
    """The config groups that a command's defaults name."""
    choices = composed(command, hydra=True).hydra.runtime.choices
    return [group for group in choices if not group.startswith("hydra/")]


def command_of(path):
    """The command that a config names in its first lines, or None."""
    head = "\n".join(path.read_text(encoding="utf-8").splitlines()[:3])
    names = {"calibrate": ("make calibrate", "rolaq.calib"), "eval": ("make eval", "rolaq.eval")}
    return next((name for name, texts in names.items() if any(text in head for text in texts)), None)


CASES = [
    (command, group, path.stem)
    for command in COMMANDS
    for group in groups(command)
    for path in sorted((CONF / group).glob("*.yaml"))
    if command_of(path) in (None, command) or group not in ("experiment", "debug")
]


@pytest.mark.parametrize(("command", "group", "name"), CASES)
def test_every_option_of_every_group_composes(command, group, name):
    needed = [override for key, override in NEEDED.items() if key in groups(command)]
    cfg = composed(command, f"{group}={name}", *needed)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for key in set(READERS) & set(groups(command)):
        resolve(cfg[key], READERS[key])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_stay_in_their_folder_and_name_themselves(command):
    cfg = composed(command, hydra=True)
    assert cfg.hydra.job.chdir is False
    assert cfg.hydra.job.name == command
    if "data" in groups(command):  # the others write no run folder
        assert str(cfg.hydra.run.dir).startswith("outputs/")


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_model_files_are_named_after_their_model(path):
    cfg = composed("calibrate", f"model={path.stem}", "model.path=owner/name")
    assert cfg.model.name == ("name" if path.stem == "auto" else path.stem)


@pytest.mark.parametrize(
    "path", sorted([*CONF.glob("experiment/*.yaml"), *CONF.glob("debug/*.yaml")]), ids=lambda path: path.stem
)
def test_experiments_start_with_their_command(path):
    assert command_of(path), f"{path.name} names no command in its first lines"
