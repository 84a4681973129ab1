"""Load a frozen causal language model and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError, one_line
from rolaq.common.files import find

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def pick_device(device: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU; other names as torch reads them.

    Raises:
        RolaqError: not a device name, or a GPU that is not there.
    """
    if device in ("auto", "map"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise RolaqError(f"model.device={device!r} is no device: use auto, map, cpu or cuda[:N]") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RolaqError(
            f"model.device={device!r}: there are {torch.cuda.device_count()} GPUs here; use auto"
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)


def load_model(cfg: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in ``eval()`` mode with all parameters frozen, and its tokenizer.

    Raises:
        RolaqError: no such model, no access to it, or Transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    source, device = source_of(cfg), pick_device(cfg.device)
    options: dict[str, Any] = {"dtype": pick_dtype(cfg.dtype, device), "revision": cfg.revision}
    if cfg.attn_implementation:
        options["attn_implementation"] = cfg.attn_implementation
    if cfg.device == "map":
        options["device_map"] = "auto"
    try:
        # Transformers' own class is preferred even where remote code, for a tokenizer, is trusted
        trust = cfg.trust_remote_code and not _is_native(source, cfg.revision)
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=trust, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unloadable(cfg, error) from error
    tokenizer = load_tokenizer(cfg)
    if cfg.device != "map":
        model = model.to(device)
    return model.eval().requires_grad_(False), tokenizer


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a padding token (its end-of-text token if it has none).

    Raises:
        RolaqError: as for `load_model`.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source_of(cfg), revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unloadable(cfg, error) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_native(source: str, revision: str | None) -> bool:
    """Whether the installed Transformers has the model's architecture."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    return PreTrainedConfig.get_config_dict(source, revision=revision)[0].get("model_type") in CONFIG_MAPPING


def source_of(cfg: ModelConfig) -> str:
    """The id or folder to load from; a path that can only be a folder must exist."""
    source = find(cfg.path)
    is_path = cfg.path.startswith(("pkg://", "~", ".", os.sep)) or source.count("/") > 1
    if Path(source).is_dir():
        if not (Path(source) / "config.json").exists():
            raise RolaqError(
                f"{source} holds no config.json: give a Hugging Face model folder or id as model.path=…"
            )
    elif is_path:
        raise RolaqError(
            f"there is no model folder {source}: give a folder or a Hugging Face id as model.path=…"
        )
    return source


def _unloadable(cfg: ModelConfig, error: Exception) -> RolaqError:
    """One line for whatever Transformers or the hub said."""
    text = one_line(error, limit=240)
    if "gated" in text.lower() or "401" in text or "403" in text:
        todo = "log in with `hf auth login` and accept the model's terms"
    elif "trust_remote_code" in text:
        todo = "add model.trust_remote_code=true if you trust its code"
    else:
        todo = "check the id, the network, or give a local folder as model.path=…"
    return RolaqError(f"cannot load model {cfg.path!r}: {todo} ({text})")
