"""Miniature benchmark files in the layout of the real ones."""

import json
from pathlib import Path

import lm_eval.tasks
import yaml

TASKS = Path(lm_eval.tasks.__file__).parent


def subjects(folder):
    """The data set configurations that lm-eval's tasks of a folder name."""
    texts = (path.read_text(encoding="utf-8") for path in (TASKS / folder).glob("*.yaml"))
    configs = (yaml.safe_load(text) for text in texts if "!function" not in text)
    return sorted(config["dataset_name"] for config in configs if config.get("dataset_name"))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def choices(number, letters):
    """A question of MMLU or CMMLU."""
    options = [f"{number + i}" for i in range(4)]
    if letters:
        return {"Question": f"几 {number}？", **dict(zip("ABCD", options)), "Answer": "ABCD"[number % 4]}
    return {"question": f"What is {number}?", "subject": "s", "choices": options, "answer": number % 4}


def make(root, items=2):
    """All six benchmarks below ``root``, ``items`` of each (of each subject one)."""
    for name, folder, letters in (("mmlu", "mmlu/default", False), ("cmmlu", "cmmlu", True)):
        for place, subject in enumerate(subjects(folder)):
            for split, shift in (("test", 0), ("dev", 7)):
                write(root / name / split / f"{subject}.jsonl", [choices(place + shift, letters)])
    answer = {
        "value": "the",
        "aliases": ["the", "The "],
        "normalized_value": "the",
        "normalized_aliases": ["the"],
    }
    trivia = [{"question": f"Which {i}?", "question_id": str(i), "answer": answer} for i in range(items + 3)]
    write(root / "triviaqa" / "validation.jsonl", trivia[:items])
    write(root / "triviaqa" / "train.jsonl", trivia[items:])
    sums = [
        {"question": f"{i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(items + 3)
    ]
    write(root / "gsm8k" / "test.jsonl", sums[:items])
    write(root / "gsm8k" / "train.jsonl", sums[items:])
    human = {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(g):\n    assert g(1) == 1\n",
    }
    write(root / "humaneval" / "test.jsonl", [{"task_id": f"H/{i}", **human} for i in range(items)])
    tests = {"test_list": ["assert f(1) == 1"] * 3, "test_setup_code": "", "challenge_test_list": []}
    program = {"text": "Write f.", "code": "def f(x):\n  return x", **tests}
    write(root / "mbpp" / "test.jsonl", [{"task_id": 11 + i, **program} for i in range(items)])
