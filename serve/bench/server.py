"""A server in processes of its own, for as long as a block lasts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rolaq.common.errors import RolaqError, one_line
from rolaq.serve.bench.probe import Probe


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the log that it writes."""

    url: str
    log: Path

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """The JSON, or else the text, that it answers to GET ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    @property
    def state(self) -> dict[str, Any]:
        """The first scheduler's internal state."""
        return self.get("/server_info")["internal_states"][0]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """SGLang's command line for arguments with underscores; None and False are left out."""
    found: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif isinstance(value, (list, tuple)):
            found += [flag, *map(str, value)]
        elif isinstance(value, dict):
            found += [flag, json.dumps(value)]
        elif value not in (None, False):
            found += [flag, str(value)]
    return found


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def launched(
    arguments: Mapping[str, Any],
    log: Path,
    environment: Mapping[str, str] | None = None,
    probe: Probe | None = None,
    wait_s: float = 300.0,
) -> Iterator[Server]:
    """SGLang with ``arguments`` on a free port of loopback, stopped with all its processes at the end.

    Args:
        environment: variables to add, such as `Settings.environment()`.
        probe: what to watch or change in its scheduler.

    Raises:
        RolaqError: it ended, or did not answer in ``wait_s`` seconds; gives its last error.
    """
    port = free_port()
    options = {**arguments, "host": "127.0.0.1", "port": port}
    command = [sys.executable, "-m", "rolaq.serve.bench.launch", (probe or Probe()).text(), *flags(options)]
    # killed: SGLang takes seconds to end by itself, and nothing of it is needed afterwards
    with started(command, log, f"http://127.0.0.1:{port}", environment, wait_s, patience_s=0) as server:
        yield server


@contextmanager
def started(
    command: Sequence[str], log: Path, url: str, environment: Mapping[str, str] | None = None,
    wait_s: float = 300.0, said: str = "", patience_s: float = 40.0,
) -> Iterator[Server]:  # fmt: skip
    """Any command that serves at ``url``, once it has ``said`` so in its log; raises as `launched` does.

    At the end it has ``patience_s`` seconds to end by itself, before its process group is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = _spawn(command, output, environment)
        try:
            _wait(process, url, log, wait_s, said)
            yield Server(url, log)
        finally:
            _stop(process, patience_s)


def _spawn(
    command: Sequence[str], output: IO[bytes], more: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command), stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(more or {})},
        start_new_session=True,
    )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, wait_s: float, said: str) -> None:
    """Until the server answers; SGLang opens its port when the engine is ready."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RolaqError(f"the server ended with {process.returncode}: {last_error(log)} ({log})")
        with suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url + "/model_info", timeout=5)
            if said in log.read_text(encoding="utf-8", errors="replace"):
                return
        time.sleep(0.3)
    raise RolaqError(f"the server did not answer in {wait_s:g} s: {last_error(log)} ({log})")


def _stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a server and its processes, and wait until they are gone: then their memory is free again."""
    signals = [(signal.SIGTERM, patience_s), (signal.SIGKILL, 20.0)]
    for sign, patience in signals if patience_s else signals[1:]:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            process.poll()
            if not _running(process.pid):
                return
            time.sleep(0.1)


def _running(group: int) -> bool:
    """Whether a process of the group still runs; one that merely waits to be reaped does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return True
    return False


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    named = [line for line in lines if "Error" in line or line.startswith("error:")]
    return one_line((named or lines or ["it wrote nothing"])[-1], 200)
