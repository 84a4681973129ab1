"""SGLang's pool sizing and construction, for the packed pool."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, MemoryPoolConfig

from rolaq.common.errors import RolaqError
from rolaq.serve import compat
from rolaq.serve.plugin import artifact
from rolaq.serve.pool import PackedPool
from rolaq.serve.settings import Settings
from rolaq.serve.sizing import Sizing


def sizing_of(configurator: Any) -> Sizing:
    """The pool's bytes, for the layers of this process.

    Raises:
        RolaqError: the artifact is for latents of another size, or SGLang admits more requests than there are slots.
    """
    settings, model = Settings.from_environment(), configurator.model_config
    assert settings is not None
    config = artifact().config
    identity = config.model
    if (model.kv_lora_rank, model.qk_rope_head_dim) != (identity.latent_dim, identity.rope_dim):
        raise RolaqError(
            f"the model has latents {model.kv_lora_rank} and RoPE keys {model.qk_rope_head_dim}, the artifact "
            f"{identity.latent_dim} and {identity.rope_dim}: calibrate this model"
        )
    return Sizing(
        configurator.layer_info.num_effective_layers, identity.latent_dim, identity.rope_dim, settings.slots,
        settings.sink, settings.recent, settings.sink_entries, settings.page_size, config.spec,
        config.feedback,
    )  # fmt: skip


class PackedConfigurator(DefaultPoolConfigurator):
    """Tokens that fit: every byte of rows, protected latents and tags is counted (`Sizing`)."""

    def __init__(self, configurator: Any) -> None:
        self.sizing = sizing_of(configurator)
        super().__init__(configurator)

    def _compute_cell_size(self, kvc: Any, num_layers: int) -> int:
        return self.sizing.per_token

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Tokens that fit into `available_bytes`, in whole pages.

        Raises:
            RolaqError: not even the protected rows fit.
        """
        tokens = self.sizing.tokens(available_bytes)
        if tokens <= 0:
            raise RolaqError(
                f"{available_bytes / 2**30:.2f} GiB are left for the cache and its protected rows alone take "
                f"{self.sizing.fixed / 2**30:.2f}: raise server.memory_fraction or lower server.slots"
            )
        return MemoryPoolConfig(max_total_num_tokens=tokens)


def create(configurator: Any) -> PackedConfigurator:
    """Stands in for `create_memory_pool_configurator`."""
    return PackedConfigurator(configurator)


def build(configurator: Any, *, max_total_num_tokens: int, **ignored: Any) -> PackedPool:
    """Stands in for `KVCacheConfigurator._build_mla_kv_pool`.

    Raises:
        RolaqError: SGLang's page size is not the one the windows were laid out for.
    """
    settings = Settings.from_environment()
    assert settings is not None
    if configurator.pool_page_size != settings.page_size:
        raise RolaqError(
            f"SGLang's page size is {configurator.pool_page_size}, the packed pool's {settings.page_size}: "
            "pass the same to both"
        )
    model, layers = configurator.model_config, configurator.layer_info
    return PackedPool(
        artifact(),
        settings,
        sizing_of(configurator),
        size=max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        layer_num=layers.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=compat.memory_saver(configurator),
        start_layer=layers.start_layer,
        end_layer=layers.end_layer,
    )
