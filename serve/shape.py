"""A model's shape and size for the planner: from its settings, its config, or its files."""

from __future__ import annotations

from pathlib import Path

from rolaq.common.config import Geometry, ModelConfig
from rolaq.common.errors import RolaqError, one_line
from rolaq.common.models import source_of
from rolaq.serve import identity
from rolaq.serve.sizing import BF16_BYTES


def geometry_of(cfg: ModelConfig) -> Geometry:
    """The shape given in `conf/model/`, or read from the model's config.

    Raises:
        RolaqError: the config cannot be read, or is none that can be served.
    """
    if cfg.geometry is not None:
        return cfg.geometry
    config = identity.read_config(cfg)
    model = identity.identify(config, cfg)
    return Geometry(
        layers=model.layers,
        latent_dim=model.latent_dim,
        rope_dim=model.rope_dim,
        heads=config["num_attention_heads"],
        parameters=_parameters(cfg),
    )


def _parameters(cfg: ModelConfig) -> int:
    """Parameters of a model, counted on a model without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source_of(cfg), revision=cfg.revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise RolaqError(
            f"cannot count the parameters of {cfg.name}: give model.geometry ({one_line(error, 200)})"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(cfg: ModelConfig, parameters: int) -> int:
    """Bytes of the weights: of the files where they lie on this machine, else BF16."""
    index = identity.local_file(cfg, "model.safetensors.index.json") if _is_folder(cfg) else None
    single = identity.local_file(cfg, "model.safetensors") if _is_folder(cfg) else None
    files = sorted(index.parent.glob("*.safetensors")) if index else [single] if single else []
    return sum(path.stat().st_size for path in files) or BF16_BYTES * parameters


def _is_folder(cfg: ModelConfig) -> bool:
    """Whether the model's path is a folder that is there; a planner needs none."""
    try:
        return Path(source_of(cfg)).is_dir()
    except RolaqError:
        return False
