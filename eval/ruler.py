"""RULER's eight retrieval tasks for a method and budget, through lm-eval."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolaq.common.config import DataConfig
from rolaq.common.files import find
from rolaq.common.progress import progress
from rolaq.eval.batching import fit, recovering
from rolaq.eval.divergence import batch_rows
from rolaq.eval.methods import digest
from rolaq.eval.niah import generator, quiet, sentence_splitter
from rolaq.eval.paired import packed
from rolaq.eval.results import Row
from rolaq.eval.ruler_config import RulerConfig
from rolaq.eval.session import Run, Session
from rolaq.quant.protection import Protection

if TYPE_CHECKING:
    from rolaq.eval.lm import QuantizedLM
    from rolaq.quant.methods.base import Method

TASKS = Path(__file__).parent / "tasks"
ESSAYS = "PaulGrahamEssays.json"


def essay_text(cfg: RulerConfig, data: DataConfig) -> tuple[list[str], str | None, str]:
    """Files of the essay haystack, the domain to take of them, and what to call it in a report.

    RULER's own essays when they are given or lie in ``eval/ruler`` under ``data.root``; otherwise
    the test text's ``essay_domain``.
    """
    if cfg.essay:
        return cfg.essay, None, ", ".join(cfg.essay)
    root = Path(find(data.root)) if data.root and not data.root.startswith("hf:") else None
    for folder in (root, root.parent) if root else ():
        if (path := folder / "eval" / "ruler" / ESSAYS).is_file():
            return [str(path)], None, "Paul Graham's essays (RULER's own)"
    return (
        data.test,
        cfg.essay_domain,
        f"{cfg.essay_domain} of the {data.name} test text (not RULER's essays)",
    )


class Ruler:
    """The tasks with their items, made once and the same for every method.

    Attributes:
        about: haystack text, sentence splitter, samples and seed, for the record.
        id: changes with any item.
    """

    def __init__(self, cfg: RulerConfig, data: DataConfig, tokenizer: str, seed: int) -> None:
        essay, domain, name = essay_text(cfg, data)
        generator()
        self.cfg = cfg
        tokens = cfg.generate or cfg.new_tokens
        sizes = {
            "lengths": cfg.used_lengths,
            "samples": cfg.samples,
            "new_tokens": cfg.new_tokens,
            "seed": seed,
        }
        self.about = {"essay": name, "sentences": sentence_splitter(), **sizes, "generate": tokens}
        self.tasks = _load(
            cfg.tasks, {"tokenizer": tokenizer, "essay": essay, "essay_domain": domain, **sizes}
        )
        for task in self.tasks.values():
            task.set_config("generation_kwargs", {"max_gen_toks": tokens}, update=True)
        documents = [doc for task in self.tasks.values() for doc in task.test_docs()]
        self.id = digest(tokens, *(f"{doc['input']}{doc['gen_prefix']}{doc['outputs']}" for doc in documents))

    def attempt(self, lm: QuantizedLM, method: Method, protection: Protection) -> list[Row]:
        """One method and budget; again where `recovering` found a remedy."""
        while True:
            with recovering(lm):
                return self.run(lm.use(method, protection))

    def run(self, lm: Any) -> list[Row]:
        """Rows of task, length, score (0 to 100, as RULER rounds it) and n, for a language model of lm-eval."""
        from lm_eval import evaluate as run_tasks  # simple_evaluate looks at the hub and at git

        samples: dict[str, list[dict[str, Any]]] = {}
        for names in self._groups(lm):
            tasks = {name: self.tasks[name] for name in names}
            with quiet():
                samples |= run_tasks(lm, {"tasks": tasks}, bootstrap_iters=0, log_samples=True)["samples"]
        return [row for name in self.tasks for row in _rows(name, samples[name])]

    def _groups(self, lm: Any) -> list[list[str]]:
        """Tasks of short and of long answers: a batch is generated until its last answer ends."""
        longest = {
            name: max(len(lm.tok_encode(", ".join(doc["outputs"]))) for doc in task.test_docs())
            for name, task in self.tasks.items()
        }
        limit = 2 * min(longest.values())
        groups = [[n for n in longest if (longest[n] <= limit) == short] for short in (True, False)]
        return [names for names in groups if names]


def _load(names: list[str], metadata: dict[str, Any]) -> dict[str, Any]:
    """The task objects; lm-eval's other tasks are not looked at."""
    from lm_eval.tasks import TaskManager

    with quiet():
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        return dict(manager.load(list(names))["tasks"])


def _rows(name: str, samples: list[dict[str, Any]]) -> list[Row]:
    by_length: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        by_length[sample["doc"]["max_length"]].append(sample)
    return [_row(name, length, own) for length, own in sorted(by_length.items())]


def _row(name: str, length: int, samples: list[dict[str, Any]]) -> Row:
    """Score as RULER rounds it; an item counts as right, for paired tests, when all its values are found."""
    scores = [sample["score"] for sample in samples]
    answers = {
        "items": digest(*(sample["prompt_hash"] for sample in samples)),
        "correct": packed([s == 1 for s in scores]),
    }
    score = round(100 * sum(scores) / len(scores), 2)
    return {"length": length, "task": name, "score": score, "n": len(scores), **answers}


def evaluate(session: Session) -> None:
    """Run what is not in the results yet, saved after every method and budget.

    The BF16 model's answers do not depend on the budget and are generated once.
    """
    cfg = session.cfg.suite.ruler
    if cfg is None:
        return
    cfg = cfg.for_context(session.context)
    session.check_lengths(cfg.used_lengths, "suite.ruler.lengths")
    runs = list(dict.fromkeys(run for item in cfg.passes for run in session.runs(item)))
    if not runs:
        return
    from rolaq.eval.lm import QuantizedLM  # lm-eval takes seconds to import

    ruler = Ruler(cfg, session.cfg.data, find(session.cfg.model.path), session.cfg.seed)
    session.results.meta["ruler"] = ruler.about
    pending = [run for run in runs if not _there(session, ruler, run)]
    if not pending:
        return
    lm = QuantizedLM(session.target.model, session.target.tokenizer)
    lm.batch_size_per_gpu = _rows_at_once(session, cfg, lm, pending[-1])
    exact: dict[str, list[Row]] = {}
    for entry, budget in progress(pending, label="RULER, method and budget"):
        rows = exact.get(entry.name) or ruler.attempt(lm, entry.method, session.protection(budget))
        if entry.method.exact:
            exact[entry.name] = rows
        for row in rows:
            session.results.add("ruler", {**_key(session, ruler, (entry, budget)), **row})
        session.results.save()


def _rows_at_once(session: Session, cfg: RulerConfig, lm: QuantizedLM, run: Run) -> int:
    """Prompts in a batch: what ``batch_tokens`` says, or what fits the run that needs most, the last one."""
    longest = max(cfg.used_lengths)
    if cfg.batch_tokens:
        return batch_rows(longest, cfg.batch_tokens)
    entry, budget = run
    lm.use(entry.method, session.protection(budget))
    return fit(lm, longest, cfg.generate or cfg.new_tokens)


def _key(session: Session, ruler: Ruler, run: Run) -> Row:
    columns = session.columns(run)
    return {**columns, "through": "simulated", "fingerprint": digest(*columns.values(), ruler.id)}


def _there(session: Session, ruler: Ruler, run: Run) -> bool:
    key = _key(session, ruler, run)
    wanted = [
        {**key, "length": length, "task": task}
        for length in ruler.cfg.used_lengths
        for task in ruler.cfg.tasks
    ]
    return all(session.results.find("ruler", row) for row in wanted)
