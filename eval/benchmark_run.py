"""The six benchmarks for every method and budget; each result is saved at once, so that a stopped run resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rolaq.common.config import DataConfig
from rolaq.common.progress import Progress
from rolaq.eval.batching import fit, recovering
from rolaq.eval.benchmarks import BENCHMARKS, SUBJECTS, content_id, folders
from rolaq.eval.harness import Harness, Outcome
from rolaq.eval.methods import digest
from rolaq.eval.paired import packed
from rolaq.eval.results import Results, Row
from rolaq.eval.sandbox import CodeEval
from rolaq.eval.session import Session
from rolaq.eval.task_config import BenchmarksConfig


@dataclass(frozen=True)
class Job:
    """One method at one budget: the columns of its rows, and what makes the language model be it.

    ``same`` names jobs with the same answers, which are computed once.
    """

    columns: Row
    start: Callable[[], object]
    same: str | None = None


@dataclass
class Benchmarks:
    """All benchmarks of a run, on one language model of lm-eval.

    ``batch`` chooses the rows at once for the longest request and its generated tokens; None leaves it to
    the language model.
    """

    cfg: BenchmarksConfig
    data: DataConfig
    results: Results
    lm: Any
    chat: bool = False
    batch: Callable[[int, int], int] | None = None

    def run(self, jobs: list[Job]) -> None:
        """Measure what is not in the results yet, benchmark by benchmark."""
        waiting = {name: [job for job in jobs if not self._there(name, job)] for name in self.cfg.tasks}
        total = sum(self._cost(name) * len(own) for name, own in waiting.items())
        if not total:
            return
        code_eval = CodeEval(self.cfg.timeout, self.cfg.memory_mb, self.cfg.workers)
        with Progress(total=total, label="benchmarks") as bar:
            for name, own in waiting.items():
                if own:
                    self._benchmark(name, own, code_eval, bar)

    def _benchmark(self, name: str, jobs: list[Job], code_eval: CodeEval, bar: Progress[Any]) -> None:
        harness = Harness(
            name,
            folders(self.cfg.root, self.data),
            self.cfg.shots_of(name),
            self.cfg.limit_of(name),
            code_eval,
            self.chat,
        )
        size = harness.prepare(self.lm)
        # the most demanding job last in the list: budgets grow along it
        jobs[-1].start()
        if self.batch:
            self.lm.batch_size_per_gpu = self.cfg.batch_size or self.batch(*size)
        known: dict[str, Outcome] = {}
        for job in jobs:
            bar.postfix(task=name, method=job.columns["method"], budget=job.columns["budget"])
            outcome = known.get(job.same or "") or self._attempt(harness, job, self._ticker(name, bar))
            if job.same:
                known[job.same] = outcome
            self.results.add("tasks", {**self.key(name, job), **_numbers(outcome)})
            self.results.save()
        forget = getattr(self.lm, "forget", lambda: None)
        forget()

    def _attempt(self, harness: Harness, job: Job, tick: Callable[[int | None], None]) -> Outcome:
        """Run; again with what `recovering` changed, where it failed for a reason that can be mended."""
        while True:
            with recovering(self.lm):
                job.start()
                self.lm.passed = tick
                outcome = harness.run(self.lm)
                tick(None)
                return outcome

    def _ticker(self, name: str, bar: Progress[Any]) -> Callable[[int | None], None]:
        """Counts a unit's rows in its share of the bar; None completes the share."""
        share, done = self._cost(name), 0

        def tick(rows: int | None) -> None:
            nonlocal done
            new = share - done if rows is None else min(rows * BENCHMARKS[name].cost, share - done)
            done += new
            bar.update(new)

        return tick

    def _cost(self, name: str) -> int:
        benchmark, limit = BENCHMARKS[name], self.cfg.limit_of(name)
        items = min(benchmark.items, (limit or benchmark.items) * SUBJECTS.get(name, 1))
        return items * benchmark.cost

    def key(self, name: str, job: Job) -> Row:
        """A row without its numbers."""
        shots, limit = self.cfg.shots_of(name), self.cfg.limit_of(name)
        asked = {"task": name, "shots": shots, "metric": BENCHMARKS[name].score, "limit": limit}
        inputs = content_id(name, folders(self.cfg.root, self.data))
        mark = digest(
            *job.columns.values(), *asked.values(), inputs, self.chat, self.lm.max_length, version("lm_eval")
        )
        return {**job.columns, **asked, "fingerprint": mark}

    def _there(self, name: str, job: Job) -> bool:
        return self.results.find("tasks", self.key(name, job)) is not None


def _numbers(outcome: Outcome) -> Row:
    answers = {"items": outcome.items, "correct": packed(outcome.correct)}
    return {"score": outcome.score, "n": len(outcome.correct), **answers}


def evaluate(session: Session) -> None:
    """The benchmarks in simulation; the BF16 model's answers do not depend on the budget."""
    cfg = session.cfg.suite.benchmarks
    if cfg is None:
        return
    from rolaq.eval.lm import QuantizedLM  # lm-eval takes seconds to import

    runs = list(dict.fromkeys(run for item in cfg.passes for run in session.runs(item)))
    lm = QuantizedLM(session.target.model, session.target.tokenizer, context=session.context)
    jobs = []
    for entry, budget in runs:
        columns = {**session.columns((entry, budget)), "through": "simulated"}

        def start(entry: Any = entry, budget: str = budget) -> object:
            return lm.use(entry.method, session.protection(budget))

        jobs.append(Job(columns, start, entry.name if entry.method.exact else None))
    chat = session.cfg.model.chat_template
    Benchmarks(cfg, session.cfg.data, session.results, lm, chat, lambda *size: fit(lm, *size)).run(jobs)
