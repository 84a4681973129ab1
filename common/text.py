"""Documents: reading, fingerprints, disjointness, and token sequences made from them."""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.common.sources import iterate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """A text, where it came from, and the domain that results are grouped by."""

    text: str
    source: str
    domain: str


def read_documents(source: str | Sequence[str], limit: int | None = None) -> list[Document]:
    """Documents of one source or several, in a fixed order, at most ``limit`` of them.

    A source is a file or a folder (read recursively) of ``.jsonl``, ``.json``, ``.txt`` or ``.md``,
    plain or compressed as ``.xz`` or ``.gz``; ``pkg://package/folder``; or
    ``hf:<dataset>[:config][:split]``, streamed. JSON objects give ``text`` and, where present,
    ``source`` and ``domain``; otherwise the domain is the file's name (text files: their folder's).

    Raises:
        RolaqError: nothing there, damaged, without text, or a streamed source without ``limit``.
    """
    names = [source] if isinstance(source, str) else list(source)
    if limit is None and any(name.startswith("hf:") for name in names):
        raise RolaqError(f"{', '.join(names)}: a streamed data set needs a limit on documents")
    found = (Document(*item) for name in names for item in iterate(name))
    documents = list(islice(found, limit))
    if not documents:
        raise RolaqError(f"no text found in {', '.join(names) or 'an empty list of sources'}")
    return documents


def document_hashes(documents: Iterable[Document]) -> list[str]:
    """SHA-256 of each text after Unicode NFKC, case folding and collapsing white space."""
    return [hashlib.sha256(_normalised(item.text).encode()).hexdigest() for item in documents]


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def fingerprint(documents: Iterable[Document]) -> str:
    """One SHA-256 for a set of documents, whatever their order."""
    return hashlib.sha256("\n".join(sorted(document_hashes(documents))).encode()).hexdigest()


def check_disjoint(**named: Sequence[Document]) -> None:
    """Make sure that no document is in two of the named lists.

    Raises:
        RolaqError: names two lists and the number of documents they share.
    """
    hashes = {name: set(document_hashes(documents)) for name, documents in named.items()}
    for first, second in combinations(hashes, 2):
        shared = len(hashes[first] & hashes[second])
        if shared:
            raise RolaqError(f"{first} and {second} text share {shared} documents: use disjoint sources")


def pack(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    limit_tokens: int | None = None,
    eos: bool = True,
    seed: int = 42,
) -> Tensor:
    """Training sequences ``[n, length]`` int64: shuffled documents joined by end-of-text.

    Each sequence starts with the tokens that the tokenizer itself puts first (BOS, for most real
    models). With ``limit_tokens``, ``n = limit_tokens // length``; without, all the text.

    Raises:
        RolaqError: too little text; says how many tokens are needed and available.
    """
    start = _start_tokens(tokenizer)
    body = length - len(start)
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    rows = None if limit_tokens is None else limit_tokens // length
    needed = body * (rows or 1) if rows is None else body * rows
    stream: list[int] = []
    for tokens in _encoded([documents[i] for i in order], tokenizer, eos):
        stream += tokens
        if rows is not None and len(stream) >= needed:
            break
    if len(stream) < needed or body < 1:
        raise RolaqError(
            f"too little text: {needed} tokens needed, {len(stream)} available; add data or ask for less"
        )
    rows = len(stream) // body if rows is None else rows
    windows = torch.tensor(stream[: rows * body], dtype=torch.long).view(rows, body)
    return torch.cat([torch.tensor(start, dtype=torch.long).expand(rows, -1), windows], dim=1)


def crop(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    per_domain: int | None = None,
) -> dict[str, Tensor]:
    """Held-out sequences by domain, each ``[n, length]`` int64, from natural documents.

    A document that is long enough gives one sequence, from its start; shorter ones of the same
    domain are joined. Only when a domain has fewer than ``per_domain`` of these do the long ones
    give their next, non-overlapping stretch. ``None`` takes one from each. Sequences start with
    the tokenizer's own first tokens, as in `pack`.

    Raises:
        RolaqError: a domain has too little text; says tokens needed and available.
    """
    start = _start_tokens(tokenizer)
    domains: dict[str, list[Document]] = {}
    for document in documents:
        domains.setdefault(document.domain, []).append(document)
    result = {}
    for domain, members in domains.items():
        rows = _natural_rows(members, tokenizer, length - len(start), per_domain)
        if not rows or len(rows) < (per_domain or 1):
            available = sum(map(len, _encoded(members, tokenizer, True)))
            needed = length * (per_domain or 1)
            raise RolaqError(f"too little {domain} text: {needed} tokens needed, {available} available")
        result[domain] = torch.tensor([start + row for row in rows], dtype=torch.long)
    return result


def _natural_rows(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, body: int, count: int | None
) -> list[list[int]]:
    """Stretches of ``body`` tokens: first stretches of all units, then second ones, and so on."""
    units: list[list[int]] = []
    waiting: list[int] = []
    for tokens in _encoded(documents, tokenizer, True):
        if len(tokens) >= body:
            units.append(tokens)
        else:
            waiting += tokens
            if len(waiting) >= body:
                units.append(waiting)
                waiting = []
        if count is not None and len(units) >= count:
            break
    if count is None:
        return [unit[:body] for unit in units]
    rounds = max((len(unit) // body for unit in units), default=0)
    stretches = (unit[k * body : (k + 1) * body] for k in range(rounds) for unit in units)
    return list(islice((row for row in stretches if len(row) == body), count))


def _start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text by itself; an end-of-text it appends is left out."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def _encoded(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, eos: bool, batch: int = 64
) -> Iterator[list[int]]:
    """Token ids of each document, end-of-text appended."""
    end = [tokenizer.eos_token_id] if eos and tokenizer.eos_token_id is not None else []
    iterator = iter(documents)
    while chunk := [document.text for document in islice(iterator, batch)]:
        encoded = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        yield from (ids + end for ids in encoded)
