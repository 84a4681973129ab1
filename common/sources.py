"""Where documents come from: files, folders, packages and streamed data sets."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rolaq.common.errors import RolaqError, one_line
from rolaq.common.files import find

Item = tuple[str, str, str]  # text, source, domain
TEXT_KEYS = ("text", "content", "page")
OPENERS: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
FORMATS = (".jsonl", ".json", ".txt", ".md")


def iterate(source: str) -> Iterator[Item]:
    """Yield ``(text, source, domain)`` of every non-empty document of a source.

    Raises:
        RolaqError: not found, of an unknown format, damaged, or without text.
    """
    if source.startswith("hf:"):
        yield from _stream(source)
        return
    path = Path(find(source))
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if _format(file) in FORMATS and not any(
                part.startswith(".") for part in file.relative_to(path).parts
            ):
                yield from _file(file)
    elif not path.exists():
        raise RolaqError(f"there is no text at {path}: give a file, a folder or hf:<dataset>")
    elif _format(path) not in FORMATS:
        raise RolaqError(f"{path}: only {', '.join(FORMATS)}, plain or .xz or .gz, can be read")
    else:
        yield from _file(path)


def _format(path: Path) -> str:
    """The suffix below a compression suffix: ``a.jsonl.xz`` is ``.jsonl``."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix


def _file(path: Path) -> Iterator[Item]:
    """Documents of one file; its name or folder stands in for a missing domain."""
    stem = path.name.split(".")[0]
    try:
        # newline="" keeps the file's line ends; texts may hold U+2028, so lines end at "\n" alone
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="") as file:
            if _format(path) in (".txt", ".md"):
                entries: Iterator[Any] = iter([{"text": file.read(), "domain": path.parent.name}])
            elif _format(path) == ".json":
                loaded = json.load(file)
                entries = iter(loaded if isinstance(loaded, list) else [loaded])
            else:
                entries = (json.loads(line) for line in _lines(file) if line.strip())
            for number, entry in enumerate(entries):
                yield from _document(entry, f"{path.name}:{number}", re.sub(r"[-_]?\d+$", "", stem) or stem)
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise RolaqError(f"cannot read {path}: {one_line(error)}") from error


def _lines(file: IO[str], size: int = 1 << 20) -> Iterator[str]:
    """Lines of a file, ended by ``\\n`` only."""
    rest = ""
    while block := file.read(size):
        *lines, rest = (rest + block).split("\n")
        yield from lines
    if rest:
        yield rest


def _document(entry: Any, where: str, domain: str) -> Iterator[Item]:
    """The document of a JSON value: a string, or an object with a text key."""
    if isinstance(entry, str):
        entry = {"text": entry}
    key = next(
        (key for key in TEXT_KEYS if isinstance(entry, dict) and isinstance(entry.get(key), str)), None
    )
    if key is None:
        raise RolaqError(f"{where} has no text: expected an object with one of {', '.join(TEXT_KEYS)}")
    meta = entry.get("meta")
    pile = meta.get("pile_set_name") if isinstance(meta, dict) else None  # the Pile's domain
    if entry[key].strip():
        yield entry[key], str(entry.get("source") or where), str(entry.get("domain") or pile or domain)


def _stream(source: str) -> Iterator[Item]:
    """Documents of a Hugging Face data set, without downloading it whole."""
    name, *rest = source.removeprefix("hf:").split(":")
    config, split = [*rest, "", ""][:2]
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield from _document(row, f"{name}:{number}", name.split("/")[-1])
    except RolaqError:
        raise
    except Exception as error:  # the hub, fsspec and datasets each raise their own kinds
        raise RolaqError(
            f"cannot stream {source}: check name and network ({one_line(error, 200)})"
        ) from error
