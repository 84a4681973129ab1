"""SGLang as a child process: its log, its end, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rolaq.common.errors import one_line

KEPT = 2000  # lines of the log that are searched for the reason of an end; SGLang's usage alone has 450
STAGES = (  # words of SGLang's log, and what the server is doing from then on
    ("Init torch distributed begin", "starting processes"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "laying out the cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("CUDA graph end", "warming up"),
    ("Application startup complete", "warming up"),
)
FAILURE = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception): |\berror: |\bSubprocess \w+ .*crashed")
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In the new process: be killed when the one that started it ends, however that ends (Linux)."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process in a group of its own, whose log is passed on line by line.

    Start it from the main thread: on Linux it is killed when the thread that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        secret: str | None = None,
        log: TextIO | None = None,
    ) -> None:
        self.stage = "starting"
        self._secret, self._log = secret, log or sys.stderr
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the other in order
            preexec_fn=_die_with_parent,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._pass_on, name="log", daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._secret:
                line = line.replace(self._secret, "***")
            self._lines.append(line.rstrip("\n"))
            self.stage = next((stage for words, stage in STAGES if words in line), self.stage)
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not stop the server
                self._log.write(line)
                self._log.flush()

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; None when `timeout` seconds pass first."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float) -> None:
        """Ask it to finish its requests, and after `grace` seconds kill its whole group."""
        try:
            if self.poll() is None:
                self._process.terminate()
                self.wait(grace)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(timeout=5)

    def reason(self, but: str | None = None) -> str:
        """Why it ended: the last error of its log, RoLaQ's own first; else the last line. Lines with `but` in
        them do not count."""
        self._reader.join(timeout=1)
        lines = [line for line in self._lines if line.strip() and not (but and but in line)]
        failures = [line for line in lines if FAILURE.search(line)]
        ours = [line for line in failures if "RolaqError: " in line]
        if ours:
            return one_line(ours[-1].partition("RolaqError: ")[2])
        line = (failures or lines or ["no output"])[-1]
        found = FAILURE.search(line)
        return one_line(line[found.start() :] if found else line)
