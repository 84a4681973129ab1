"""Generated programs run in a process of their own, with limits on time, memory, files and processes.

This keeps a broken program from harming the run; it is no defence against a malicious one: run
untrusted models in a container.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).with_name("sandbox_runner.py")
MARK = "ROLAQ_SANDBOX"


def passes(program: str, timeout: float = 10.0, memory_mb: int = 2048) -> bool:
    """Whether ``program`` (a solution followed by its tests) runs to its end without an exception.

    Args:
        timeout: seconds, of the clock and of the processor.
        memory_mb: address space of each of its processes.
    """
    token, mark = secrets.token_hex(16), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="rolaq-") as folder:
        command = [sys.executable, "-I", str(RUNNER), str(memory_mb), str(int(timeout) + 1)]
        environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", MARK: mark}
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(f"{token}\n{program}".encode("utf-8", "replace"), timeout=timeout)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            _kill(child, mark)
    # the runner says the token, which the program cannot know, after the last line of the program
    return output == token.encode()


def _kill(child: subprocess.Popen[bytes], mark: str) -> None:
    """End the program's session, then what has left it; forks may outrun one look, so look until none is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for stream in (child.stdin, child.stdout):
        if stream:
            with suppress(BrokenPipeError):
                stream.close()
    child.wait()
    for _ in range(20):
        left = _marked(mark)
        for number in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if not left:
            return


def _marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment, where the system shows it."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


class CodeEval:
    """Stands in for the ``code_eval`` metric that lm-eval's code tasks load from the hub.

    Programs are run once, in parallel when `warm` is told them beforehand.
    """

    def __init__(self, timeout: float = 10.0, memory_mb: int = 2048, workers: int | None = None) -> None:
        self.limits = (timeout, memory_mb)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or cores
        self._known: dict[str, bool] = {}

    def warm(self, programs: list[str]) -> None:
        """Run what was not run yet, several at once."""
        new = [program for program in dict.fromkeys(programs) if program not in self._known]
        with ThreadPoolExecutor(self.workers) as pool:
            for program, passed in zip(new, pool.map(self._run, new), strict=True):
                self._known[program] = passed

    def _run(self, program: str) -> bool:
        return passes(program, *self.limits)

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int] | None = None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """``({"pass@1": share of first candidates that pass}, {})``, as the metric's own ``compute``."""
        programs = [
            program_of(own[0], reference) for own, reference in zip(predictions, references, strict=True)
        ]
        self.warm(programs)
        passed = [self._known[program] for program in programs]
        return {"pass@1": sum(passed) / len(passed)}, {}


def program_of(solution: str, tests: str) -> str:
    """Solution and tests as one program."""
    return f"{solution}\n{tests}"
