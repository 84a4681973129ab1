"""SGLang options and artifacts that the packed cache does not support, each refused by name.

`refuse` reads a resolved `ServerArgs` (any version's; fields that a version lacks are off in it) and runs inside
SGLang's processes. `refuse_arguments` reads a command line before anything is started.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.serve.settings import PLUGIN, Settings

HOST = "packed rows have no tier outside the GPU, and their protected rows would not follow"
ROLES = "prefill and decode must share one packed pool"
DRAFTS = "speculative decoding is not supported yet"
SHARDED = "every GPU of a copy holds all tokens' rows"
MOVED = "the rotation is folded into weights that must stay where they are"
REPLACED = "weights may not change after the rotation is folded into them"
OTHER_POOL = "the packed pool takes the place of SGLang's own"

# Options that must be off: absent, false, zero, -1 or empty.
OFF = {
    "enable_hierarchical_cache": HOST,
    "hicache_storage_backend": HOST,
    "enable_lmcache": HOST,
    "enable_flexkv": HOST,
    "enable_hisparse": HOST,
    "enable_unified_cache_external_linker": HOST,
    "radix_cache_backend": "only SGLang's own prefix cache knows when a page is free",
    "enable_session_radix_cache": "sessions that hold rows between requests are not supported",
    "enable_streaming_session": "sessions that hold rows between requests are not supported",
    "encoder_only": ROLES,
    "enable_pdmux": ROLES,
    "enable_pd_role_switch": ROLES,
    "speculative_algorithm": DRAFTS,
    "dllm_algorithm": "diffusion models write a token more than once",
    "enable_prefill_cp": SHARDED,
    "enable_kv_cache_sharding": SHARDED,
    "enable_attn_tp_input_scattered": SHARDED,
    "enable_dp_attention": "use server.dp, which gives each copy its own pool",
    "enable_deterministic_inference": "the split of a decode step depends on the batch",
    "rl_on_policy_target": "the split of a decode step depends on the batch",
    "enable_two_batch_overlap": "the backend keeps one batch's plan",
    "enable_mixed_chunk": "a batch is either prefill or decode",
    "enable_nvidia_megakernel": "its attention reads BF16 rows",
    "enable_memory_saver": "released memory would lose rows and tags",
    "cpu_offload_gb": MOVED,
    "offload_group_size": MOVED,
    "custom_weight_loader": REPLACED,
    "checkpoint_engine_wait_weights_before_ready": REPLACED,
    "elastic_ep_backend": REPLACED,
    "enable_page_major_kv_layout": OTHER_POOL,
    "enable_unified_memory": OTHER_POOL,
    "prefill_only_disable_kv_cache": OTHER_POOL,
    "smg_grpc_mode": "the start-up proof asks the HTTP server",
    "grpc_mode": "the start-up proof asks the HTTP server",
    "use_ray": "Ray's processes do not get the plugin's settings",
}
# Sizes that must be one.
ONE = {
    "pp_size": "a pipeline of stages is not supported; use server.tp",
    "nnodes": "start each machine's copies there and put SGLang's router before them",
    "dcp_size": SHARDED,
    "attn_cp_size": SHARDED,
    "attn_dp_size": "use server.dp, which gives each copy its own pool",
}
# Options with the values that are supported.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_backend": ((PLUGIN,), "only this backend reads packed rows"),
    "prefill_attention_backend": ((None, PLUGIN), "only this backend reads packed rows"),
    "decode_attention_backend": ((None, PLUGIN), "only this backend reads packed rows"),
    "kv_cache_dtype": (
        ("auto", "bfloat16", "bf16"),
        "packed rows are 2-bit already; protected ones are BF16",
    ),
    "dtype": (("auto", "bfloat16"), "the kernels compute in BF16"),
    "disaggregation_mode": (("null", None), ROLES),
    "decoupled_spec_role": (("null", None), DRAFTS),
    "weight_cache_mode": (("off",), MOVED),
    "startup_weight_load_mode": (("serial",), REPLACED),
    "kv_canary": (("none",), "it checks BF16 rows"),
    "model_impl": (("auto", "sglang"), "the rotation is folded into SGLang's own model classes"),
}
LORA = "kv_b_proj"
# Fields of an artifact's spec with the values that there are kernels for.
KERNELS = {"group_size": (128,), "stats_dtype": ("float32",), "rope_dtype": ("bfloat16",)}
FEEDBACK_KERNELS = {"feedback_block": (32, 64, 128)}


def option(field: str) -> str:
    """A field as it is written on SGLang's command line."""
    return "--" + field.replace("_", "-")


def refuse_artifact(artifact: Artifact) -> None:
    """Raise `RolaqError` for an artifact whose spec no kernel is made for."""
    config = artifact.config
    made: dict[str, tuple[Any, ...]] = KERNELS | (FEEDBACK_KERNELS if config.feedback else {})
    for field, allowed in made.items():
        if (value := getattr(config.spec, field)) not in allowed:
            shown = " or ".join(map(str, allowed))
            raise RolaqError(
                f"artifact {artifact.id} has {field} {value}, which no kernel is made for: calibrate with "
                f"quant.spec.{field}={shown}"
            )


def refuse(server_args: Any, settings: Settings | None = None) -> None:
    """Raise `RolaqError` naming the first option that the packed cache does not support.

    With `settings`, also where SGLang's page size or number of requests is not what the pool was laid out for.
    """
    for field, why in OFF.items():
        if (value := getattr(server_args, field, None)) and value != -1:
            raise _refusal(field, value, why)
    for field, why in ONE.items():
        if (value := getattr(server_args, field, 1)) not in (1, None):
            raise _refusal(field, value, why)
    for field, (allowed, why) in ONLY.items():
        if field == "dtype" and getattr(server_args, "device", None) == "cpu":
            continue  # tests run SGLang on a CPU, where references stand in for the kernels
        if (value := getattr(server_args, field, allowed[0])) not in allowed:
            shown = " or ".join(str(item) for item in allowed if item is not None)
            raise _refusal(field, value, f"{why}; supported: {shown}")
    _refuse_lora(server_args)
    if settings is not None:
        _refuse_layout(server_args, settings)


def _refusal(field: str, value: Any, why: str) -> RolaqError:
    shown = "" if value is True else f" {value}"
    return RolaqError(f"{option(field)}{shown} is not supported on the packed cache: {why}")


def _refuse_lora(server_args: Any) -> None:
    """LoRA is fine where it leaves alone what the rotation is folded into."""
    if not (getattr(server_args, "enable_lora", None) or getattr(server_args, "lora_paths", None)):
        return
    targets = getattr(server_args, "lora_target_modules", None)
    if not targets or LORA in targets or "all" in targets:
        raise RolaqError(
            f"LoRA on {LORA} is not supported on the packed cache, the rotation is folded into it: "
            "name the other modules with --lora-target-modules"
        )


def _refuse_layout(server_args: Any, settings: Settings) -> None:
    page, requests = server_args.page_size, server_args.max_running_requests
    if page != settings.page_size:
        raise RolaqError(
            f"--page-size {page}: the packed pool was laid out for pages of {settings.page_size}"
        )
    if requests is None or requests > settings.slots:
        raise RolaqError(
            f"--max-running-requests {requests}: the packed pool has rows for {settings.slots} requests; "
            "give at most that"
        )


def parse(arguments: list[str]) -> SimpleNamespace:
    """Options of a command line by field: a flag is True, an option its words (one, or a list of them)."""
    fields: dict[str, Any] = {}
    name = None
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            fields[name] = [value] if equals else []
        elif name is None:
            raise RolaqError(
                f"server.args starts with {word!r}: options of sglang.launch_server start with --"
            )
        else:
            fields[name].append(word)
    return SimpleNamespace(**{k: v[0] if len(v) == 1 else v or True for k, v in fields.items()})
