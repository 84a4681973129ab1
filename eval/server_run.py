"""The benchmarks and RULER through a running server: what is served is what is measured."""

from __future__ import annotations

from rolaq.common.errors import RolaqError, lookup
from rolaq.common.files import find
from rolaq.common.models import load_tokenizer
from rolaq.eval.benchmark_run import Benchmarks, Job
from rolaq.eval.config import EvalConfig
from rolaq.eval.methods import METHODS, digest
from rolaq.eval.results import Results, Row
from rolaq.eval.ruler import Ruler


def run(cfg: EvalConfig, results: Results) -> None:
    """Measure what is not in the results yet; every row says ``through: server``.

    Raises:
        RolaqError: no server there, a suite without a part that goes through one, no known context.
    """
    from rolaq.eval.server_lm import ServerLM  # lm-eval takes seconds to import

    lookup("method", cfg.server.method, METHODS)
    if not (cfg.suite.benchmarks or cfg.suite.ruler):
        raise RolaqError(f"suite={cfg.suite.name} has no part for a server: use suite=paper or suite=ruler")
    if cfg.model.context is None:
        raise RolaqError("model.context is not set: give the tokens that the server takes")
    lm = ServerLM(cfg.server, load_tokenizer(cfg.model), cfg.model.context)
    print(f"server: {lm.url} serves {lm.served}" + (" (SGLang)" if lm.native else ""))
    served = {"method": cfg.server.method, "seed": cfg.server.seed, "budget": cfg.server.budget}
    columns: Row = {"model": cfg.model.name, **served, "reading": "serving", "method_id": digest(lm.served)}
    columns["through"] = "server"
    if cfg.suite.ruler:
        _ruler(cfg, results, lm, columns)
    if cfg.suite.benchmarks:
        job = Job(columns, lambda: None)
        Benchmarks(cfg.suite.benchmarks, cfg.data, results, lm, cfg.model.chat_template).run([job])


def _ruler(cfg: EvalConfig, results: Results, lm: object, columns: Row) -> None:
    settings = cfg.suite.ruler
    assert settings is not None and cfg.model.context is not None
    ruler = Ruler(settings.for_context(cfg.model.context), cfg.data, find(cfg.model.path), cfg.seed)
    results.meta["ruler"] = ruler.about
    key = {**columns, "fingerprint": digest(*columns.values(), ruler.id)}
    wanted = [
        {**key, "length": length, "task": task}
        for length in ruler.cfg.used_lengths
        for task in ruler.cfg.tasks
    ]
    if all(results.find("ruler", row) for row in wanted):
        return
    for row in ruler.run(lm):
        results.add("ruler", {**key, **row})
    results.save()
