"""From a model's text to the program that is tested: filters of the code benchmarks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rolaq.eval.sandbox import CodeEval, program_of

NEW_EXAMPLE = re.compile(r"\[DONE\]|\[BEGIN\]|\nYou are an expert Python programmer")
TESTS = re.compile(r"(assert\b|print\s*\(|if __name__\b)")


def mbpp_code(text: str) -> str:
    """An answer to MBPP cut to its solution (paper, Appendix A.1).

    Cut at the first new example or fence, then at the first assertion that follows some code at the
    outermost level; test calls there (``print``, a main block) are removed.
    """
    text = text.replace("\r\n", "\n")
    if "```" in text:
        parts = text.split("```")
        text = parts[1].removeprefix("python") if not parts[0].strip() else parts[0]
    lines = NEW_EXAMPLE.split(text)[0].split("\n")
    kept: list[str] = []
    dropping = False
    for line in lines:
        outer = bool(line.strip()) and not line[0].isspace()
        if outer and line.startswith("assert") and any(kept):
            break
        if outer:
            dropping = TESTS.match(line) is not None
        if not dropping:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


def rescored(code_eval: CodeEval) -> Callable[..., list[list[str]]]:
    """lm-eval filter for MBPP: solutions out of answers; runs all of them before they are scored."""

    def apply(resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
        found = [[mbpp_code(text) for text in own] for own in resps]
        tests = ["\n".join(doc["test_list"][:3]) for doc in docs]
        code_eval.warm([program_of(own[0], test) for own, test in zip(found, tests, strict=True)])
        return found

    return apply


def warmed(code_eval: CodeEval, build: Callable[..., list[list[str]]]) -> Callable[..., list[list[str]]]:
    """lm-eval filter for HumanEval: the harness's own ``build``; runs all programs before they are scored."""

    def apply(resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[list[str]]:
        found = build(resps, docs)
        tests = [f"{doc['test']}\ncheck({doc['entry_point']})" for doc in docs]
        code_eval.warm([program_of(own[0], test) for own, test in zip(found, tests, strict=True)])
        return found

    return apply


@contextmanager
def evaluated_by(code_eval: CodeEval) -> Iterator[None]:
    """Within it the harness's code tasks load ``code_eval`` instead of the metric on the hub."""
    import evaluate

    original = evaluate.load
    evaluate.load = lambda *args, **options: code_eval
    try:
        yield
    finally:
        evaluate.load = original
