"""`python -m rolaq.serve.bench.launch PROBE [SGLang's arguments]`: its HTTP server with a probed scheduler."""

from __future__ import annotations

import functools
import os
import sys

from rolaq.serve.bench.probe import Probe, run_scheduler


def main(arguments: list[str]) -> None:
    """Start SGLang as `sglang.launch_server` does, but for the function that its scheduler processes run."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    probe, rest = Probe.parse(arguments[0]), arguments[1:]
    load_plugins()
    try:
        launch_server(
            prepare_server_args(rest), run_scheduler_process_func=functools.partial(run_scheduler, probe)
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
