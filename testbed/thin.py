"""Keep every n-th document of a corpus's training shards, for machines that cannot take all of it.

python -m rolaq.testbed.thin CORPUS OUT --every 4
"""

import argparse
import json
import lzma
import shutil
from pathlib import Path

from rolaq.testbed.data import read_documents, shard_paths


def thin(corpus: Path, out: Path, every: int) -> None:
    """Write documents 0, n, 2n, … of each `train/` shard to `out`; copy `val/` and `test/` whole."""
    for split in ("val", "test"):
        shutil.copytree(corpus / split, out / split, dirs_exist_ok=True, copy_function=shutil.copyfile)
    (out / "train").mkdir(parents=True, exist_ok=True)
    for path in shard_paths(corpus / "train"):
        kept = [d for n, d in enumerate(read_documents(path)) if n % every == 0]
        name = path.name.removesuffix(".xz") + ".xz"
        with lzma.open(out / "train" / name, "wt", encoding="utf8", preset=1) as file:
            file.writelines(json.dumps(d, ensure_ascii=False) + "\n" for d in kept)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=4)
    args = parser.parse_args()
    thin(args.corpus, args.out, args.every)


if __name__ == "__main__":
    main()
