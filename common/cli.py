"""Run a command configured by Hydra, with one-line errors instead of its tracebacks."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rolaq.common import config as _config  # noqa: F401 (registers the resolvers that conf/ uses)
from rolaq.common.errors import RolaqError, debugging, main, one_line, unknown
from rolaq.common.files import find

CONFIG_PATH = "pkg://rolaq.conf"


def run_hydra(config_name: str, fn: Callable[[DictConfig], Any]) -> None:
    """Compose ``conf/<config_name>.yaml`` with the command line and call ``fn`` with the result.

    Everything that Hydra offers works: groups, overrides, ``-m`` sweeps and launchers, ``--help``,
    ``--cfg job``. A wrong name or value ends with one line and exit code 1.
    """
    import hydra

    # with this set Hydra raises, instead of printing its own report; ours follows
    os.environ["HYDRA_FULL_ERROR"] = "1"
    job = hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name=config_name)(main(fn))
    _reported(config_name, job)()


def _reported(config_name: str, job: Callable[[], Any]) -> Callable[[], Any]:
    """``job`` with the errors of Hydra and OmegaConf turned into RolaqError."""
    from hydra.errors import HydraException

    @main
    @functools.wraps(job)
    def wrapped() -> Any:
        try:
            return job()
        except (HydraException, OmegaConfBaseException) as error:
            if debugging():
                raise
            raise explain(error, config_name) from error

    return wrapped


def explain(error: Exception, config_name: str) -> RolaqError:
    """What a Hydra or OmegaConf error means for the person who typed the command."""
    missing, options = getattr(error, "missing_cfg_file", None), getattr(error, "options", None)
    if missing:
        kind, _, name = str(missing).removesuffix(".yaml").partition("/")
        wrong = unknown(kind, name, options or _options(kind))
        hint = "; any other: model=auto model.path=<id or folder>" if kind == "model" else ""
        return RolaqError(f"{wrong}{hint}")
    text = one_line(error)
    found = re.search(r"Could not override '([^'@]+)|Key '([^']+)' is not in", text)
    if found:
        key = (found[1] or found[2]).lstrip("+~")
        return unknown("setting", key, _near_settings(key, config_name))
    override = getattr(error, "override", None)
    if override is not None:
        return RolaqError(f"cannot read the argument {override!r}: write key=value ({text})")
    return RolaqError(text)


def _options(group: str) -> list[str]:
    """The names in a folder of ``conf/``."""
    folder = Path(find(f"{CONFIG_PATH}/{group}"))
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _near_settings(key: str, config_name: str) -> list[str]:
    """The settings of a command most like ``key``, or its top-level ones."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("rolaq.conf", version_base="1.3"):
        cfg = compose(config_name)
    paths = _paths(OmegaConf.to_container(cfg, resolve=False))
    near = difflib.get_close_matches(key, paths, n=5, cutoff=0.5)
    last = key.rpartition(".")[2]
    near += [path for path in paths if path.rpartition(".")[2] == last and path not in near]
    return near or [path for path in paths if "." not in path]


def _paths(node: Any, prefix: str = "") -> list[str]:
    """Dotted paths of all keys, groups included."""
    if not isinstance(node, dict):
        return []
    return [p for key, child in node.items() for p in (prefix + str(key), *_paths(child, f"{prefix}{key}."))]


def program() -> str:
    """How this command was called, for records: ``rolaq.calib model=tiny``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else os.path.basename(sys.argv[0])
    return " ".join([f"python -m {name}" if spec else name, *sys.argv[1:]])
