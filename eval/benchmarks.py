"""The paper's six benchmarks: lm-eval's own tasks, on the Hugging Face data sets or on local files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolaq.common.config import DataConfig
from rolaq.common.errors import RolaqError, one_line
from rolaq.common.files import find

if TYPE_CHECKING:
    from datasets import DatasetDict

HUB = "hub"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark as the harness knows it.

    ``task`` is lm-eval's task or group, defined below ``folder`` of its tasks; ``score`` the metric and
    filter that count (paper, Appendix A.1); ``data`` the data set on the hub, of ``items`` items; ``cost`` the
    rough time of one of them, for progress; ``chat`` the task for models with a chat template, where the code
    is taken out of the answer.
    """

    title: str
    task: str
    folder: str
    shots: int
    score: str
    data: str
    items: int
    cost: int
    generates: bool = True
    chat: str | None = None

    @property
    def metric(self) -> str:
        """The metric's name alone."""
        return self.score.split(",")[0]


BENCHMARKS = {
    "mmlu": Benchmark("MMLU", "mmlu", "mmlu/default", 5, "acc,none", "cais/mmlu", 14042, 1, generates=False),
    "cmmlu": Benchmark("CMMLU", "cmmlu", "cmmlu", 5, "acc,none", "haonan-li/cmmlu", 11582, 1, generates=False),
    "triviaqa": Benchmark(
        "TriviaQA", "triviaqa", "triviaqa", 5, "exact_match,remove_whitespace", "mandarjoshi/trivia_qa", 17944, 2
    ),
    "gsm8k": Benchmark("GSM8K", "gsm8k", "gsm8k", 8, "exact_match,flexible-extract", "openai/gsm8k", 1319, 15),
    "humaneval": Benchmark(
        "HumanEval", "humaneval", "humaneval", 0, "pass@1,create_test", "openai/openai_humaneval", 164, 60,
        chat="humaneval_instruct",
    ),
    "mbpp": Benchmark(
        "MBPP", "mbpp", "mbpp", 3, "pass_at_1,rescored", "google-research-datasets/mbpp", 500, 15
    ),
}  # fmt: skip
SUBJECTS = {"mmlu": 57, "cmmlu": 67}

# a data set's name on the hub, and the files of its splits in a local folder ({} is its configuration)
FILES = {
    "cais/mmlu": {"test": "mmlu/test/{}.jsonl", "dev": "mmlu/dev/{}.jsonl"},
    "haonan-li/cmmlu": {"test": "cmmlu/test/{}.jsonl", "dev": "cmmlu/dev/{}.jsonl"},
    "mandarjoshi/trivia_qa": {"train": "triviaqa/train.jsonl", "validation": "triviaqa/validation.jsonl"},
    "openai/gsm8k": {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"},
    "openai/openai_humaneval": {"test": "humaneval/test.jsonl"},
    "google-research-datasets/mbpp": {"test": "mbpp/test.jsonl"},
}


def folders(root: str | None, data: DataConfig) -> list[Path]:
    """Where local benchmark files may lie; empty for the hub.

    ``root`` as it is given; null stands for ``data.root`` with ``data=local``.
    """
    if root == HUB or (root is None and data.name != "local"):
        return []
    given = Path(find(root or data.root or ""))
    return [given, given / "eval", given.parent / "eval"]


def content_id(name: str, places: list[Path]) -> str:
    """Stands for the content of a benchmark's local files; the data set's name where it is on the hub."""
    return _content(BENCHMARKS[name].data, tuple(places))


@cache
def _content(data: str, places: tuple[Path, ...]) -> str:
    if not places:
        return data
    found = hashlib.sha256()
    for pattern in FILES[data].values():
        files = (sorted(place.glob(pattern.format("*"))) for place in places)
        for path in next((paths for paths in files if paths), []):
            found.update(path.read_bytes())
    return found.hexdigest()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, split at newlines only.

    Raises:
        RolaqError: damaged; names the line.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise RolaqError(f"{path}, line {number} is not JSON: {one_line(error, 100)}") from error
    if not rows:
        raise RolaqError(f"{path} holds no rows")
    return rows


def local_dataset(name: str, configuration: str | None, places: list[Path]) -> DatasetDict:
    """The splits of a hub data set from the first of ``places`` that has its files.

    Raises:
        RolaqError: a data set that has no local form, or a missing file; says where it was looked for.
    """
    import datasets

    if name not in FILES:
        raise RolaqError(f"there are no local files for the data set {name}: use suite.benchmarks.root=hub")
    splits = {}
    for split, pattern in FILES[name].items():
        wanted = pattern.format(configuration)
        path = next((place / wanted for place in places if (place / wanted).is_file()), None)
        if path is None:
            raise RolaqError(f"{wanted} is missing: looked for it in {', '.join(map(str, places))}")
        splits[split] = datasets.Dataset.from_list(rows_of(path))
    return datasets.DatasetDict(splits)


@contextmanager
def redirected(places: list[Path]) -> Iterator[None]:
    """Within it ``datasets.load_dataset`` reads local files where ``places`` are given; lm-eval's tasks call it."""
    import datasets

    original = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        if places:
            return local_dataset(path, name, places)
        try:
            return original(path, name, **options)
        except Exception as error:  # the hub, its client and datasets each raise their own kinds
            raise RolaqError(
                f"cannot load {path} from the Hugging Face hub ({one_line(error, 160)}): check the network, or give "
                "local files with data=local data.root=<folder>"
            ) from error

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = original
