"""Typed, frozen configuration: Hydra composes, pydantic checks."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

from rolaq.common.errors import RolaqError, one_line


class Config(BaseModel):
    """Base of every config model: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


C = TypeVar("C", bound=BaseModel)

# ${basename:path} names outputs after the last part of a model's id or folder
OmegaConf.register_new_resolver("basename", lambda path: str(path).rstrip("/").split("/")[-1], replace=True)
# ${pick:name,{a:1,b:2},3} is the option of that name, or else the last argument
OmegaConf.register_new_resolver(
    "pick", lambda name, options, default: dict(options).get(name, default), replace=True
)


class Geometry(Config):
    """What capacity depends on, known without the model's files.

    Attributes:
        layers: attention layers, each with a cache of its own.
        latent_dim, rope_dim: d and d_r, coordinates of the cached latent and of the RoPE key.
        heads: attention heads.
        parameters: of the whole model, tied ones once.
    """

    layers: int
    latent_dim: int
    rope_dim: int
    heads: int
    parameters: int


class ModelConfig(Config):
    """Which model to load, and how.

    Attributes:
        name: short name, used in output paths.
        path: Hugging Face id, folder, or ``pkg://package/folder`` for files shipped with RoLaQ.
        revision: commit or tag on the hub.
        dtype: ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        device: ``auto`` (GPU if there is one), ``map`` (spread over all GPUs), or a torch device.
        context: longest sequence in tokens to use; null takes the model's own.
        artifact: folder of the calibrated artifact that comes with the model, or null.
        geometry: the model's shape for the capacity planner; null reads it from the model's config.
        chat_template: prompts of the benchmarks go through the tokenizer's chat template.
    """

    name: str
    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    context: int | None = None
    artifact: str | None = None
    geometry: Geometry | None = None
    chat_template: bool = False


class TrackingConfig(Config):
    """Experiment tracking: ``wandb`` (online), ``offline`` (synced later) or ``none``."""

    mode: Literal["wandb", "offline", "none"] = "offline"
    project: str = "rolaq"
    entity: str | None = None
    tags: list[str] = []


class DataConfig(Config):
    """Text sources, each a list that ``rolaq.common.text.read_documents`` understands.

    ``fit`` is OSCAR's text; when empty it is cut from ``train``. ``limit`` bounds the documents
    read per list, which streamed sources (``hf:…``) need.
    """

    name: str
    root: str | None = None
    fit: list[str] = []
    train: list[str]
    val: list[str]
    test: list[str] = []
    limit: int | None = None


def resolve(cfg: DictConfig, model: type[C]) -> C:
    """Turn a composed Hydra config into ``model``.

    Raises:
        RolaqError: a value is missing (``???``), unknown, of the wrong type or out of bounds;
            names field, value and what is allowed.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error) from error
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        prefix = cfg._get_full_key(None)
        raise RolaqError("; ".join(_describe(item, prefix) for item in error.errors())) from error


def _unresolved(error: OmegaConfBaseException) -> RolaqError:
    """A value still ``???``, named by its dotted path, or an interpolation that leads nowhere."""
    # an interpolation to a missing value names it in the text alone
    missing = re.search(r"while resolving interpolation: Missing mandatory value: ([\w.-]+)", str(error))
    key = error.full_key if isinstance(error, MissingMandatoryValue) else missing and missing[1]
    if not key:
        return RolaqError(f"the configuration cannot be resolved: {one_line(error)}")
    return RolaqError(f"{key} is not set: give {key}=… on the command line")


def _dotted(*parts: object) -> str:
    """Parts of a setting's path joined by dots, empty ones left out."""
    return ".".join(str(part) for part in parts if part != "")


def _describe(item: Any, prefix: str) -> str:
    """One pydantic error as `field=value: reason`."""
    field = _dotted(prefix, *item["loc"]) or "configuration"
    if item["type"] == "extra_forbidden":
        return f"{field} is not a known setting"
    if item["type"] == "missing":
        return f"{field} is not set: give {field}=… on the command line"
    reason = one_line(item["msg"]).removeprefix("Value error, ")
    if isinstance(item["input"], dict):  # a rule between several settings names them itself
        return f"{field}: {reason}"
    return f"{field}={item['input']!r}: {reason}"
