"""Start SGLang, wait until it is ready, prove that it serves the packed cache, stay with it, stop it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.serve import proof
from rolaq.serve.arguments import arguments, environment
from rolaq.serve.child import Child
from rolaq.serve.client import Client
from rolaq.serve.compat import SUPPORTED
from rolaq.serve.config import KEY_VARIABLE, LOOPBACK, ServeConfig, ServerConfig
from rolaq.serve.settings import PLUGIN, Settings

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
PAUSE, PERIOD = 1.0, 10.0  # seconds between two looks at the server, and two lines of progress


@dataclass(frozen=True)
class Plan:
    """What is to be started: configuration, pool settings, artifact, and the model's vocabulary."""

    cfg: ServeConfig
    settings: Settings
    artifact: Artifact
    vocabulary: int


def check_machine(server: ServerConfig) -> None:
    """Raise `RolaqError` unless SGLang, the plugin, enough GPUs and the port are there."""
    import torch

    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise RolaqError(
            "SGLang is not installed: use `make serve`, or pip install 'rolaq[serve]'"
        ) from error
    if version not in SUPPORTED:
        raise RolaqError(f"SGLang {version} is not supported: install one of {', '.join(SUPPORTED)}")
    if not importlib.metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN):
        raise RolaqError("SGLang does not see the plugin: reinstall RoLaQ (pip install -e '.[serve]')")
    needed, there = server.tp * server.dp, torch.cuda.device_count()
    if there == 0:
        raise RolaqError(
            "no CUDA device: the packed cache is served on NVIDIA GPUs; `make eval` simulates it on a CPU"
        )
    if there < needed:
        raise RolaqError(
            f"server.tp={server.tp} times server.dp={server.dp} needs {needed} GPUs, there are {there}"
        )
    check_port(server)


def check_port(server: ServerConfig) -> None:
    """Raise `RolaqError` when the address is taken: another server would answer in this one's place."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            raise RolaqError(
                f"server.host={server.host} server.port={server.port} cannot be listened on "
                f"({error.strerror}): choose another port"
            ) from error


@contextlib.contextmanager
def key_file(key: str | None) -> Iterator[list[str]]:
    """Arguments that hand the API key to SGLang in a file that this user alone can read."""
    if key is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="rolaq-") as folder:  # mode 0700
        path = Path(folder) / "key.yaml"
        path.write_text(json.dumps({"api-key": key}), encoding="utf-8")
        yield ["--config", str(path)]


def wait_ready(child: Child, client: Client, timeout: float) -> float:
    """Wait until the server is up; returns the seconds it took.

    Raises:
        RolaqError: it ended, or is not up in time.
    """
    began = told = time.monotonic()
    # a health request of SGLang's generates a token: it answers when the whole path works
    while client.status("/health", timeout=30) != 200:
        if (status := child.poll()) is not None:
            raise ended(child, status)
        now = time.monotonic()
        if now - began > timeout:
            raise RolaqError(
                f"the server is not up after {timeout:.0f} s ({child.stage}): raise server.startup_timeout"
            )
        if now - told >= PERIOD:
            told = now
            print(f"[rolaq] {now - began:.0f} s: {child.stage}", file=sys.stderr, flush=True)
        time.sleep(PAUSE)
    if (status := child.poll()) is not None:
        raise ended(child, status)
    return time.monotonic() - began


def ended(child: Child, status: int) -> RolaqError:
    """The error for a server that ended by itself."""
    reason = child.reason()
    unloaded = f"invalid choice: '{PLUGIN}'"
    if unloaded in reason:  # SGLang logged why and went on without it
        reason = f"the plugin did not load: {child.reason(but=unloaded)}"
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return RolaqError(f"SGLang {how}: {reason}")


def prove(plan: Plan, client: Client) -> list[dict[str, Any]]:
    """The `rolaq` block of every copy, after all checks of `proof`."""
    server = plan.cfg.server
    if server.api_key():
        proof.check_key(client)
    wanted = proof.expected(plan.artifact, plan.settings)
    proof.check_states(client.get("/server_info"), wanted, server.dp)
    proof.generate(client, server.dp, plan.vocabulary)
    blocks = proof.check_states(client.get("/server_info"), wanted, server.dp)
    proof.check_written(blocks)
    return blocks


def start(plan: Plan, client: Client, launch: Sequence[str]) -> tuple[Child, float]:
    """The server's process once it is up, and the seconds it took; stopped again where it is not."""
    cfg, key = plan.cfg, plan.cfg.server.api_key()
    with key_file(key) as secret:
        child = Child([*launch, *arguments(cfg, plan.settings), *secret], environment(plan.settings), key)
        try:
            return child, wait_ready(child, client, cfg.server.startup_timeout)
        except BaseException:
            child.stop(grace=5)
            raise


@contextlib.contextmanager
def running(
    plan: Plan, launch: Sequence[str] | None = None
) -> Iterator[tuple[Child, list[dict[str, Any]], float]]:
    """The server, proven: its process, the `rolaq` block of every copy, seconds to start. Stopped at the end.

    `launch` is the command in place of SGLang's, before its arguments.
    """
    server = plan.cfg.server
    if server.host not in LOOPBACK and server.api_key() is None:
        print(
            f"warning: {server.host} is open to the network without an API key: set {KEY_VARIABLE}",
            file=sys.stderr,
        )
    client = Client(server.url, server.api_key())
    child, seconds = start(plan, client, launch or LAUNCH)
    try:
        yield child, prove(plan, client), seconds
    finally:
        child.stop(server.stop_timeout)
