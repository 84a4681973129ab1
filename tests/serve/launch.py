"""SGLang's scheduler with everything below it, in this process; what differs between SGLang's versions."""

from __future__ import annotations

import inspect
from typing import Any


def start(arguments: dict[str, Any]) -> Any:
    """A scheduler for one CPU; what it would send to other processes is dropped."""
    import sglang_on_cpu
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    sglang_on_cpu.register()
    server_args = ServerArgs(**arguments)
    if hasattr(server_args, "resolve_once"):  # 0.5.23
        server_args.resolve_once()
    ports = PortArgs.init_new(server_args)
    _publish(server_args)
    old = len(inspect.signature(Scheduler.__init__).parameters) > 3
    # 0.5.17: GPU, ranks of six kinds, none among data-parallel replicas; 0.5.23 has them from `publish`
    scheduler = Scheduler(server_args, ports, *((0, 0, 0, 0, 0, 0, None) if old else ()))
    for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
        sender.socket.close(linger=0)
        sender.socket = None
    return scheduler


def _publish(server_args: Any) -> None:
    from sglang.srt import runtime_context as context

    ranks = {}
    if hasattr(context, "SpawnRanks"):
        ranks["ranks"] = context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    context.publish(server_args, role="scheduler", **ranks)


def reset() -> None:
    """Undo what an engine leaves in the process: process groups and configuration."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import reset_context

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()
