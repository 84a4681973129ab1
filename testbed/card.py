"""Write the measured numbers of trained models into the model card.

python -m rolaq.testbed.card testbed/tiny/training.json [MORE.json ...]
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CARD = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"
LOW = 80.0


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def section(report: dict[str, Any]) -> str:
    """The card's section on one run, from its `training.json`."""
    seconds = report["seconds"]
    return "\n\n".join(
        [
            f"### {report['size']}",
            f"{report['parameters']:,} parameters; {report['tokens'] / 1e6:,.0f}M tokens in"
            f" {report['steps']:,} steps and {seconds / 60:.1f} minutes on one"
            f" {report['device']}; seed {report['seed']}; torch {report['versions']['torch']},"
            f" transformers {report['versions']['transformers']}.",
            f"```\n{report['command']}\n```",
            f"Held-out perplexity per token (bits per byte), windows of {report['context']:,} tokens:",
            perplexity_table(report),
            "Retrieval accuracy in percent, BF16, greedy:",
            retrieval_table(report),
            low_tasks(report),
        ]
    )


def perplexity_table(report: dict[str, Any]) -> str:
    """Perplexity and bits per byte of each domain and held-out split."""
    splits = [s for s in ("val", "test") if f"{s}_perplexity" in report]
    domains = sorted({d for s in splits for d in report[f"{s}_perplexity"]})
    rows = []
    for domain in domains:
        cells = [report[f"{split}_perplexity"].get(domain) for split in splits]
        rows.append([domain, *(f"{c['perplexity']:.2f} ({c['bits_per_byte']:.3f})" for c in cells)])
    return table(["domain", *splits], rows)


def retrieval_table(report: dict[str, Any]) -> str:
    """Accuracy of each task at each measured length."""
    lengths = [key for key in report if key.startswith("retrieval_") and "share" not in key]
    tasks = report[lengths[0]]["tasks"] if lengths else {}
    rows = [[task, *(report[length]["tasks"][task] for length in lengths)] for task in tasks]
    rows.append(["average", *(report[length]["average"] for length in lengths)])
    return table(["task", *(length.removeprefix("retrieval_") for length in lengths)], rows)


def low_tasks(report: dict[str, Any]) -> str:
    """Names the tasks under 80 % at 1K."""
    scores = report.get("retrieval_1024", {"tasks": {}})["tasks"]
    low = [f"{task} ({score})" for task, score in scores.items() if score < LOW]
    return f"Under {LOW:.0f} % at 1K: {', '.join(low) or 'none'}."


def main() -> None:
    """Replace what stands between the card's markers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+")
    args = parser.parse_args()
    sections = [section(json.loads(path.read_text("utf8"))) for path in args.reports]
    before, rest = CARD.read_text("utf8").split(BEGIN)
    after = rest.split(END)[1]
    body = "\n\n".join(sections)
    CARD.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", "utf8")


if __name__ == "__main__":
    main()
