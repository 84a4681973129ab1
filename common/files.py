"""Files: atomic writes, JSON, Markdown tables, shipped resources, the environment's record."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError, one_line

LIBRARIES = ("torch", "transformers", "numpy", "scipy", "safetensors", "datasets", "lm_eval", "hydra-core")


def find(path: str | os.PathLike[str]) -> str:
    """``pkg://package.name/sub/folder`` as a real path inside the installed package; others as given.

    Raises:
        RolaqError: no such package.
    """
    text = os.fspath(path)
    if not text.startswith("pkg://"):
        return os.path.expanduser(text)
    package, _, rest = text.removeprefix("pkg://").partition("/")
    try:
        return str(importlib.resources.files(package).joinpath(*filter(None, rest.split("/"))))
    except ModuleNotFoundError as error:
        raise RolaqError(f"{text}: there is no package '{package}'; reinstall RoLaQ") from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what is written there replaces ``path`` on success.

    Keeps the suffix, so that writers which choose a format by it still work. A reader never sees
    a half-written file; after an exception ``path`` is as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: str | os.PathLike[str], obj: Any) -> Path:
    """Write JSON atomically (keys in insertion order, indent 2).

    Raises:
        RolaqError: the object holds NaN or infinity, or something JSON cannot hold.
    """
    try:
        text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    except (ValueError, TypeError) as error:
        raise RolaqError(f"cannot write {os.fspath(path)}: {one_line(error)}") from error
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return Path(path)


def _plain(value: Any) -> Any:
    """Tensors, NumPy values and paths as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        RolaqError: missing or damaged; names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RolaqError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    except ValueError as error:
        raise RolaqError(f"{os.fspath(path)} is not valid JSON: {one_line(error)}") from error


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, str]) -> str:
    """A Markdown table of ``rows``; ``columns`` are keys, or keys mapped to headings.

    Floats get four significant digits, missing values a dash; numbers are right-aligned.
    """
    headings = dict(columns) if isinstance(columns, Mapping) else {key: key for key in columns}
    numeric = {key: any(isinstance(row.get(key), (int, float)) for row in rows) for key in headings}
    lines = [
        "| " + " | ".join(headings.values()) + " |",
        "|" + "|".join(" ---: " if numeric[key] else " --- " for key in headings) + "|",
    ]
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in headings) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    """A table cell: four significant digits, pipes escaped."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def environment() -> dict[str, Any]:
    """What produced a result: library versions, commit of the source (or null), device, platform."""
    import torch

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = torch.cuda.is_available()
    return {
        "versions": versions,
        "commit": commit(),
        "device": torch.cuda.get_device_name() if gpu else platform.machine() + " CPU",
        "devices": torch.cuda.device_count() if gpu else os.cpu_count(),
    }


def commit() -> str | None:
    """Git commit of the source tree this package runs from, ``+`` appended when it has changes."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
