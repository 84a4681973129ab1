"""Text for calibration: three disjoint sets, training batches and validation documents."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rolaq.calib.config import CalibConfig
from rolaq.calib.schedule import length_of_step
from rolaq.common.config import DataConfig
from rolaq.common.errors import RolaqError
from rolaq.common.text import Document, check_disjoint, crop, fingerprint, pack, read_documents

Piece = tuple[int, Document]  # index of the document it was cut from

FIT_SEED = 42  # OSCAR's text is the same for every seed of a calibration
FIT_CHARACTERS = 4096  # about 1K tokens: OSCAR's text holds pieces of several documents
TRAIN_CHARACTERS = 65_536  # longer documents are shuffled in pieces, so that no book fills a batch
TRAIN_PIECES = 64  # of little text, smaller pieces: each length takes whole ones


class CalibrationData(NamedTuple):
    """Token ids on the CPU: fit `[n, length]`, one training batch per step `[B, n]`, validation per length.

    `about` names each set's fingerprint, documents and tokens; it goes into the artifact.
    """

    fit: Tensor
    batches: list[Tensor]
    validation: dict[int, Tensor]
    about: dict[str, Any]

    def tokens_digest(self) -> str:
        """First 16 digits of the SHA-256 of all token ids, in the order in which they are used."""
        digest = hashlib.sha256()
        for ids in (self.fit, *self.batches, *self.validation.values()):
            digest.update(ids.long().numpy().tobytes())
        return digest.hexdigest()[:16]


def prepare(
    source: DataConfig, tokenizer: PreTrainedTokenizerBase, config: CalibConfig, seed: int
) -> CalibrationData:
    """Read, check and tokenize the text that a run uses; `config.lengths` must be set.

    `seed` orders the training text. Without a fitting text of its own, OSCAR's are pieces of the training text,
    in a fixed order, and are taken out of it.
    Raises `RolaqError` for too little text, or a document in two sets.
    """
    lengths = config.used_lengths
    train, val = read_documents(source.train, source.limit), read_documents(source.val, source.limit)
    fit_source = read_documents(source.fit, source.limit) if source.fit else train
    fit = list(take(cut(fit_source, FIT_CHARACTERS, FIT_SEED), tokenizer, config.fit_tokens, "fitting"))
    fit_documents = _documents(fit_source, fit)
    if not source.fit:
        train = without(train, fit, FIT_CHARACTERS)
    batches, used = training_batches(train, tokenizer, config, seed)
    check_disjoint(fit=fit_documents, train=used, val=val)
    length = min(max(lengths), config.fit_tokens)
    rows = pack([piece for _, piece in fit], tokenizer, length, config.fit_tokens, seed=FIT_SEED)
    validation = {n: validation_documents(val, tokenizer, n, config.validation.documents) for n in lengths}
    about = {
        "name": source.name,
        "fit": _about(fit_documents, [rows]),
        "train": _about(used, batches),
        "val": _about(val, validation.values()),
    }
    return CalibrationData(rows, batches, validation, about)


def training_batches(
    train: Sequence[Document], tokenizer: PreTrainedTokenizerBase, config: CalibConfig, seed: int
) -> tuple[list[Tensor], list[Document]]:
    """One batch `[tokens_per_step / length, length]` per step, and the documents they came from.

    Each length has its own share of the text, so that no token is seen twice: one epoch.
    """
    lengths = config.used_lengths
    plan = [length_of_step(step, lengths) for step in range(config.steps)]
    characters = sum(len(document.text) for document in train)
    size = max(FIT_CHARACTERS, min(TRAIN_CHARACTERS, characters // TRAIN_PIECES))
    pieces, used, queues, planned = cut(train, size, seed), [], {}, [0]
    for length in lengths:
        tokens = plan.count(length) * config.tokens_per_step
        run, before = config.steps * config.tokens_per_step, sum(planned)
        share = list(take(pieces, tokenizer, tokens, "training", before, run)) if tokens else []
        planned.append(tokens)
        used += share
        rows = (
            pack([piece for _, piece in share], tokenizer, length, tokens, seed=seed)
            if tokens
            else torch.empty(0)
        )
        queues[length] = iter(rows.split(config.tokens_per_step // length))
    return [next(queues[length]) for length in plan], _documents(train, used)


def validation_documents(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> Tensor:
    """`[count, length]` token ids of held-out documents, the domains taking turns."""
    domains = len({document.domain for document in documents})
    rows = crop(documents, tokenizer, length, per_domain=-(-count // domains)).values()
    turns = (row for turn in zip_longest(*rows) for row in turn if row is not None)
    return torch.stack(list(islice(turns, count)))


def cut(documents: Sequence[Document], characters: int, seed: int) -> Iterator[Piece]:
    """Pieces of at most `characters` of every document, in an order given by `seed`."""
    spans = [
        (index, start)
        for index, document in enumerate(documents)
        for start in range(0, len(document.text), characters)
    ]
    random.Random(seed).shuffle(spans)
    for index, start in spans:
        document = documents[index]
        yield index, replace(document, text=document.text[start : start + characters])


def without(documents: Sequence[Document], pieces: Iterable[Piece], characters: int) -> list[Document]:
    """The documents less the pieces that `cut` made of them with the same `characters`."""
    taken: dict[int, set[str]] = {}
    for index, piece in pieces:
        taken.setdefault(index, set()).add(piece.text)
    rest = [
        replace(document, text=_remainder(document.text, taken[index], characters))
        if index in taken
        else document
        for index, document in enumerate(documents)
    ]
    return [document for document in rest if document.text]


def _remainder(text: str, taken: set[str], characters: int) -> str:
    parts = (text[start : start + characters] for start in range(0, len(text), characters))
    return "".join(part for part in parts if part not in taken)


def take(
    pieces: Iterator[Piece],
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    purpose: str,
    after: int = 0,
    run: int = 0,
) -> Iterator[Piece]:
    """Pieces off the iterator until they hold `tokens` tokens, end-of-text counted.

    Raises `RolaqError` when they run out: for a share of a `run`, which follows `after` tokens of it, with the
    numbers of the whole run.
    """
    available = 0
    while available < tokens:
        piece = next(pieces, None)
        if piece is None:
            raise RolaqError(
                f"too little {purpose} text: more than {run or tokens} tokens needed, {after + available} available; "
                "add text, or lower calib.steps or calib.fit_tokens"
            )
        available += len(tokenizer(piece[1].text, add_special_tokens=False, verbose=False)["input_ids"]) + 1
        yield piece


def _documents(documents: Sequence[Document], pieces: Iterable[Piece]) -> list[Document]:
    return [documents[index] for index in sorted({index for index, _ in pieces})]


def _about(documents: Sequence[Document], ids: Iterable[Tensor]) -> dict[str, Any]:
    tokens = sum(rows.numel() for rows in ids)
    return {"fingerprint": fingerprint(documents), "documents": len(documents), "tokens": tokens}
