"""Everything that differs between the SGLang versions that the plugin supports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SUPPORTED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
TESTED = ("0.5.17", "0.5.23")


def write_location(loc: Any) -> Tensor:
    """Slots of new tokens: a tensor, or since 0.5.18 a `KVWriteLoc` around it."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    return unwrap_write_loc(loc)[0]


def attention_data_parallel_size(configurator: Any) -> int:
    """Workers among which data-parallel attention divides the requests."""
    parallel = getattr(configurator, "ps", None)
    return parallel.attn_dp_size if parallel is not None else configurator.attn_dp_size


def prepare_backend(backend: Any, runner: Any) -> None:
    """Attributes that SGLang reads off a backend."""
    backend.kv_index_translator = getattr(runner, "kv_index_translator", None)


def memory_saver(configurator: Any) -> bool:
    """Whether `--enable-memory-saver` is on."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().features.enable_memory_saver)


def resolution() -> str:
    """The method of `ServerArgs` after which its options are resolved: construction, later a step of its own."""
    from sglang.srt.server_args import ServerArgs

    return "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"
