"""One benchmark through lm-eval: its tasks loaded once, run for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rolaq.common.errors import RolaqError, one_line
from rolaq.eval.benchmarks import BENCHMARKS, Benchmark, redirected
from rolaq.eval.completions import evaluated_by, rescored, warmed
from rolaq.eval.methods import digest
from rolaq.eval.niah import quiet
from rolaq.eval.sandbox import CodeEval

FEWSHOT_SEED = 1234
"""lm-eval's own default."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a benchmark gives.

    Attributes:
        score: the harness's number (subjects weighted by size) in percent.
        correct: item by item, in the harness's order.
        items: stands for the prompts and targets; outcomes with the same one compare item by item.
    """

    score: float
    correct: list[bool]
    items: str


class Harness:
    """The tasks of a benchmark with their requests, built once and the same for every method.

    Args:
        name: a key of `BENCHMARKS`.
        places: folders of local files; empty for the hub.
        shots: examples in the prompt.
        limit: items per task, None for all.
        chat: put prompts into the model's chat template.
    """

    def __init__(
        self,
        name: str,
        places: list[Path],
        shots: int,
        limit: int | None,
        code_eval: CodeEval,
        chat: bool = False,
    ) -> None:
        self.benchmark, self.limit, self.chat = BENCHMARKS[name], limit, chat
        self.task = self.benchmark.chat or self.benchmark.task if chat else self.benchmark.task
        self.loaded = _load(self.task, self.benchmark, places, code_eval)
        for task in self.loaded["tasks"].values():
            if task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", shots)
            task.set_fewshot_seed(FEWSHOT_SEED)
            task.build_all_requests = _once(task, task.build_all_requests)
        _filter_code(self.benchmark, self.loaded["tasks"], code_eval)

    def run(self, lm: Any) -> Outcome:
        """Score a language model of lm-eval.

        Raises:
            RolaqError: a server that could not be reached, memory that one row does not fit.
        """
        from lm_eval import evaluate  # simple_evaluate looks at the hub and at git

        with quiet(), templates_kept():
            found = evaluate(
                lm,
                self.loaded,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=True,
                confirm_run_unsafe_code=True,
                apply_chat_template=self.chat,
            )
        score = found["results"][self.task][self.benchmark.score]
        samples = [item for name in self.loaded["tasks"] for item in self._scored(found["samples"][name])]
        correct = [bool(item[self.benchmark.metric]) for item in samples]
        _verify(self.task, score, correct)
        prompts = (item["prompt_hash"] + item["target_hash"] for item in samples)
        return Outcome(100 * float(score), correct, digest(*prompts))

    def _scored(self, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The items under the filter that counts, in the order of the data set."""
        wanted = self.benchmark.score.split(",")[1]
        return sorted((item for item in samples if item["filter"] == wanted), key=lambda item: item["doc_id"])

    def prepare(self, lm: Any) -> tuple[int, int]:
        """Build the requests.

        Returns:
            Tokens of the longest one as the model will see it, and of those how many are generated.

        Raises:
            RolaqError: more examples asked for than there are.
        """
        room, generated = lm.max_length, 0
        options = {"chat_template": lm.apply_chat_template} if self.chat else {}
        for task in self.loaded["tasks"].values():
            try:
                with quiet(), templates_kept():
                    task.build_all_requests(limit=self.limit, apply_chat_template=self.chat, **options)
            except (AssertionError, ValueError) as error:  # too few to choose from
                raise RolaqError(f"suite.benchmarks.shots of {self.task}: {one_line(error)}") from error
            if self.benchmark.generates:
                wanted = task.get_config("generation_kwargs") or {}
                generated = max(generated, wanted.get("max_gen_toks", lm.max_gen_toks))
        texts = {item.args[0] for task in self.loaded["tasks"].values() for item in task.instances}
        tokens = max(len(lm.tok_encode(text)) for text in sorted(texts, key=len)[-4:])
        return min(tokens + generated, room), generated


@contextmanager
def templates_kept() -> Iterator[None]:
    """Within it lm-eval compiles each prompt template once; by itself it does so for every example of every item."""
    from lm_eval.utils import env

    with patch.object(env, "from_string", cache(env.from_string)):
        yield


def _load(task: str, benchmark: Benchmark, places: list[Path], code_eval: CodeEval) -> dict[str, Any]:
    """The task or group with its data; only its own folder of lm-eval's tasks is looked at."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.tasks.__file__).parent / benchmark.folder
    with quiet(), redirected(places), evaluated_by(code_eval):
        return dict(TaskManager(include_path=str(folder), include_defaults=False).load([task]))


def _once(task: Any, build: Callable[..., None]) -> Callable[..., None]:
    """Build the requests at the first call only; later ones clear what the last method answered."""
    built = False

    def ready(**options: Any) -> None:
        nonlocal built
        if not built:
            build(**options)
            built = True
        for request in task.instances:
            request.resps.clear()
            request.filtered_resps.clear()

    return ready


def _filter_code(benchmark: Benchmark, tasks: dict[str, Any], code_eval: CodeEval) -> None:
    """Let the code tasks run their programs in parallel; MBPP's answers are cut to the solution first."""
    from lm_eval.filters import build_filter_ensemble

    for task in tasks.values():
        if benchmark.task == "mbpp":
            name, apply = "rescored", rescored(code_eval)
        elif benchmark.task == "humaneval":
            name = "create_test"
            apply = warmed(code_eval, task.config.filter_list[0]["filter"][0]["filter_fn"])
        else:
            return
        task._filters = [build_filter_ensemble(name, [["custom", {"filter_fn": apply}]])]


def _verify(task: str, score: float, correct: list[bool]) -> None:
    if not correct or not math.isclose(score, sum(correct) / len(correct), abs_tol=1e-9):
        raise RolaqError(f"{task}: lm-eval's score {score} is not the share of its {len(correct)} items")
