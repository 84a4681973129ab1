"""The SGLang plugin: puts the packed pool, its backend and the folded projections into an unmodified SGLang.

Inert unless the process was started with `Settings.environment()`. SGLang logs and swallows what goes wrong
in a plugin; so nothing here is trusted to have worked: the backend refuses to start on any other pool or on
projections that are not folded, and the launcher asks the running server.
"""

from __future__ import annotations

import functools
from typing import Any

from rolaq.quant.artifact import Artifact
from rolaq.serve.refusals import refuse_artifact
from rolaq.serve.settings import PLUGIN, Settings


def register() -> None:
    """Entry point `sglang.srt.plugins`: register backend and hooks where serving was asked for."""
    settings = Settings.from_environment()
    if settings is None:
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([PLUGIN])
    # Absorbed attention then passes latent and RoPE parts apart.
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(PLUGIN)
    AttentionBackendRegistry.register(PLUGIN, _forward_method)
    register_attention_backend(PLUGIN)(_backend)
    _hook(settings)


def _forward_method(attention: Any, forward_batch: Any) -> Any:
    """Prefill in expanded form (the backend adds the cached prefix itself), decode absorbed."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    extend = forward_batch.forward_mode.is_extend_without_speculative()
    return AttnForwardMethod.MHA if extend else AttnForwardMethod.MLA


def _backend(runner: Any) -> Any:
    from rolaq.serve.backend import RolaqBackend

    return RolaqBackend(runner)


@functools.cache
def artifact() -> Artifact:
    """This process's artifact.

    Raises:
        RolaqError: there is none, or it does not verify.
    """
    settings = Settings.from_environment()
    assert settings is not None
    found = Artifact.load(settings.artifact)
    refuse_artifact(found)
    return found


def _hook(settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rolaq.serve import sizes, watch

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    sizing = "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator"
    minicpm3 = "sglang.srt.models.minicpm3.MiniCPM3AttentionMLA.forward"
    HookRegistry.register(f"{runner}.load_model", _fold, HookType.AFTER)
    HookRegistry.register(sizing, sizes.create, HookType.REPLACE)
    HookRegistry.register(f"{configurator}._build_mla_kv_pool", sizes.build, HookType.REPLACE)
    HookRegistry.register(minicpm3, _minicpm3, HookType.REPLACE)
    watch.hook(settings)


def _fold(result: Any, runner: Any, *arguments: Any, **named: Any) -> None:
    from rolaq.serve.fold import fold_model

    fold_model(runner.model, artifact())


def _minicpm3(*arguments: Any, **named: Any) -> Any:
    from rolaq.serve.minicpm3 import forward

    return forward(*arguments, **named)
