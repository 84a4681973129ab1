"""Read corpus shards, tokenize them in parallel and hash what was read."""

import hashlib
import json
import lzma
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT_ID = 0
CHUNK_CHARACTERS = 1_000_000

# Read by forked workers, so that no text is copied between processes.
_texts: list[str] = []
_tokenizer: Tokenizer | None = None


def shard_paths(folder: Path) -> list[Path]:
    """The `.jsonl` and `.jsonl.xz` files of a folder, sorted; `FileNotFoundError` when none."""
    paths = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")])
    if not paths:
        raise FileNotFoundError(f"no .jsonl or .jsonl.xz file in {folder}")
    return paths


def read_documents(path: Path) -> Iterator[dict[str, str]]:
    """Yield the objects (`text`, `source`, `domain`) of one shard."""
    open_file = lzma.open if path.suffix == ".xz" else open
    # newline="\n": some texts hold U+2028, which is no end of line here.
    with open_file(path, "rt", encoding="utf8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every shard, by file name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shard_paths(folder)}


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Token ids (uint16, 1-D) of texts, each followed by end-of-text."""
    parts = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        parts.append(np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(parts)


def start_worker(tokenizer_file: str) -> None:
    """Load the tokenizer once per process, single-threaded."""
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(tokenizer_file)


def worker_tokenizer() -> Tokenizer:
    """The tokenizer of this worker process; `RuntimeError` outside of one."""
    if _tokenizer is None:
        raise RuntimeError("start_worker() has not run in this process")
    return _tokenizer


def encode_documents(texts: list[str], tokenizer_file: Path, workers: int) -> np.ndarray:
    """All texts as one stream of token ids (uint16, 1-D), end-of-text after each."""
    global _texts
    _texts = texts
    spans, start, size = [], 0, 0
    for stop, text in enumerate(texts, start=1):
        size += len(text)
        if size >= CHUNK_CHARACTERS or stop == len(texts):
            spans.append((start, stop))
            start, size = stop, 0
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, start_worker, (str(tokenizer_file),)) as pool:
        streams = pool.map(_encode_span, spans, chunksize=1)
    _texts = []
    return np.concatenate(streams)


def _encode_span(span: tuple[int, int]) -> np.ndarray:
    return encode(worker_tokenizer(), _texts[slice(*span)])
