"""Run by `sandbox.py` with ``python -I``: limits itself, runs the program from its input, reports on stdout."""

from __future__ import annotations

import os
import resource
import sys


def limit(memory_mb: int, seconds: int) -> None:
    """Bounds for this process and its children; none can be raised again."""
    memory = memory_mb << 20
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def disarm() -> None:
    """Take away what starts processes or ends others."""

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("not allowed here")

    names = ["fork", "forkpty", "kill", "killpg", "system", "popen", "posix_spawn", "posix_spawnp", "setsid"]
    names += [name for name in dir(os) if name.startswith(("exec", "spawn"))]
    for place in (os, sys.modules["posix"]):
        for name in names:
            if hasattr(place, name):
                setattr(place, name, refuse)
    for module in (
        "_posixsubprocess",
        "subprocess",
        "multiprocessing",
        "ctypes",
        "_ctypes",
        "_multiprocessing",
    ):
        sys.modules[module] = None  # type: ignore[assignment]


def main() -> None:
    """Read the token and the program; print the token when the program has run to its end."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    token, _, program = sys.stdin.buffer.read().decode("utf-8", "replace").partition("\n")
    report = os.dup(1)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    write, leave = os.write, os._exit
    disarm()
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException:
        leave(1)
    write(report, token.encode())
    leave(0)


if __name__ == "__main__":
    main()
