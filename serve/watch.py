"""Hooks into SGLang's scheduler: what it tells about the cache, and what it must not do while it runs.

`plugin.register` calls `hook`. An installed hook of SGLang's registry gets the hooked call's arguments, after its
result where it runs afterwards.
"""

from __future__ import annotations

from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.serve.compat import resolution
from rolaq.serve.guard import check_ids
from rolaq.serve.metrics import Gauges, describe
from rolaq.serve.refusals import REPLACED, refuse
from rolaq.serve.settings import PLUGIN, Settings

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
COLLECTOR = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"
REQUESTS = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Requests to change weights, and the class of the answer in SGLang's `io_struct`.
UPDATES = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
}


class Watch:
    """One scheduler process's hooks. The scheduler is known from its own start on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scheduler: Any = None
        self._gauges: Gauges | None = None

    def check(self, result: Any, server_args: Any, *arguments: Any, **named: Any) -> None:
        """After SGLang resolved its options: refuse the unsupported ones, which ends the process."""
        refuse(server_args, self._settings)

    def started(self, result: Any, scheduler: Any, *arguments: Any, **named: Any) -> None:
        """After a scheduler's start: remember it; refuse what SGLang has changed since, or has no place to hook."""
        self._scheduler = scheduler
        refuse(scheduler.server_args, self._settings)
        if missing := missing_hooks():
            raise RolaqError(f"this SGLang has no {', '.join(missing)}: install a supported version")

    def internal_state(self, result: Any, scheduler: Any, *arguments: Any, **named: Any) -> Any:
        """After `get_internal_state`: add the `rolaq` block."""
        result.internal_state[PLUGIN] = {**_describe(scheduler), "missing_hooks": missing_hooks()}
        return result

    def publish(self, result: Any, collector: Any, *arguments: Any, **named: Any) -> None:
        """After SGLang wrote its gauges: write ours, with the same labels."""
        if self._scheduler is None:
            return
        if self._gauges is None:
            self._gauges = Gauges(dict(collector.labels))
        if self._gauges.due():
            self._gauges.set(_describe(self._scheduler))


def _describe(scheduler: Any) -> dict[str, Any]:
    return describe(scheduler.tp_worker.model_runner.attn_backend, scheduler.token_to_kv_pool_allocator)


def _unchanged(answer: str) -> Any:
    """Stands in for a weight update: answers that it is refused."""

    def refused(*arguments: Any, **named: Any) -> Any:
        from sglang.srt.managers import io_struct

        message = f"not supported on the packed cache: {REPLACED}; start a new server"
        return getattr(io_struct, answer)(success=False, message=message)

    return refused


def missing_hooks() -> list[str]:
    """Targets that SGLang could not hook. It logs them and goes on; a served cache must not."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(set(HookRegistry._hooks) - HookRegistry._patched)


def hook(settings: Settings) -> Watch:
    """Register everything with SGLang's hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    watch = Watch(settings)
    after = {
        f"sglang.srt.server_args.ServerArgs.{resolution()}": watch.check,
        f"{SCHEDULER}.__init__": watch.started,
        f"{SCHEDULER}.get_internal_state": watch.internal_state,
        f"{COLLECTOR}.log_stats": watch.publish,
        f"{REQUESTS}._validate_one_request": check_ids,
    }
    for target, function in after.items():
        HookRegistry.register(target, function, HookType.AFTER)
    for name, answer in UPDATES.items():
        HookRegistry.register(f"{UPDATER}.{name}", _unchanged(answer), HookType.REPLACE)
    return watch
