"""The command line and the environment of the SGLang process."""

from __future__ import annotations

import os
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.common.models import source_of
from rolaq.serve.config import KEY_VARIABLE, ServeConfig, ServerConfig
from rolaq.serve.refusals import ONE, option, parse, refuse
from rolaq.serve.settings import PLUGIN, Settings

# What this command sets itself, and the setting to use for it.
OURS = {
    "model_path": "model",
    "model": "model",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "host": "server.host",
    "port": "server.port",
    "tp": "server.tp",
    "tp_size": "server.tp",
    "tensor_parallel_size": "server.tp",
    "dp": "server.dp",
    "dp_size": "server.dp",
    "data_parallel_size": "server.dp",
    "max_running_requests": "server.slots",
    "page_size": "server.page_size",
    "mem_fraction_static": "server.memory_fraction",
    "context_length": "server.context",
    "chunked_prefill_size": "server.chunked_prefill",
    "disable_radix_cache": "server.prefix_cache=false",
    "enable_metrics": "server.metrics",
}
SECRET = ("api_key", "admin_api_key", "config")


def check_arguments(server: ServerConfig) -> None:
    """Raise `RolaqError` for options in `server.args` that this command sets, or that are not supported.

    SGLang also takes shortened options; what is missed here `refuse` finds inside SGLang's processes.
    """
    given = parse(server.args)
    for field in vars(given):
        if field in OURS:
            raise RolaqError(f"server.args: {option(field)} is set by this command; use {OURS[field]}")
        if field in SECRET:
            raise RolaqError(
                f"server.args: {option(field)} is not taken here: a key on the command line shows in the process "
                f"list; set {KEY_VARIABLE} or server.api_key_file, and give other options one by one"
            )
    for field in ONE:
        if hasattr(given, field):
            setattr(given, field, _number(getattr(given, field)))
    refuse(given)
    if server.api_key() and _number(getattr(given, "tokenizer_worker_num", 1)) != 1:
        raise RolaqError(
            "--tokenizer-worker-num above 1 leaves the server open: SGLang checks API keys in one worker only"
        )


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def arguments(cfg: ServeConfig, settings: Settings) -> list[str]:
    """Arguments of `sglang.launch_server`; those of `server.args` come last."""
    model, server = cfg.model, cfg.server
    values = {
        "model_path": source_of(model),
        "served_model_name": model.name,
        "revision": model.revision,
        "dtype": "bfloat16",
        "attention_backend": PLUGIN,
        "page_size": settings.page_size,
        "max_running_requests": settings.slots,
        "host": server.host,
        "port": server.port,
        "tp_size": server.tp,
        "dp_size": server.dp,
        "mem_fraction_static": server.memory_fraction,
        "context_length": server.context,
        "chunked_prefill_size": server.chunked_prefill,
    }
    flags = {
        "trust_remote_code": model.trust_remote_code,
        "disable_radix_cache": not server.prefix_cache,
        "enable_metrics": server.metrics,
        "disable_prefill_cuda_graph": True,  # prefill reads as many chunks of the past as there are
    }
    words = [word for k, v in values.items() if v is not None for word in (option(k), str(v))]
    return [*words, *(option(k) for k, on in flags.items() if on), *server.args]


def environment(settings: Settings) -> dict[str, str]:
    """This process's environment with the plugin turned on, and without the key."""
    kept = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
    return {**kept, **settings.environment(), "PYTHONUNBUFFERED": "1"}
