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
        RolaqError: no server there, one that serves something else, a suite without a part that goes through one, no known context.
    """
    from rolaq.eval.server_lm import ServerLM  # lm-eval takes seconds to import

    lookup("method", cfg.server.method, METHODS)
    if not (cfg.suite.benchmarks or cfg.suite.ruler):
        raise RolaqError(f"suite={cfg.suite.name} has no part for a server: use suite=paper or suite=ruler")
    if cfg.model.context is None:
        raise RolaqError("model.context is not set: give the tokens that the server takes")
    lm = ServerLM(cfg.server, load_tokenizer(cfg.model), cfg.model.context)
    for cache in lm.caches():
        check_labels(cfg, cache, lm.served)
    print(f"server: {lm.url} serves {lm.served}" + (" (SGLang)" if lm.native else ""))
    served = {"method": cfg.server.method, "seed": cfg.server.seed, "budget": cfg.server.budget}
    columns: Row = {"model": cfg.model.name, **served, "reading": "serving", "method_id": digest(lm.served)}
    columns["through"] = "server"
    if cfg.suite.ruler:
        _ruler(cfg, results, lm, columns)
    if cfg.suite.benchmarks:
        job = Job(columns, lambda: None)
        Benchmarks(cfg.suite.benchmarks, cfg.data, results, lm, cfg.model.chat_template).run([job])


def check_labels(cfg: EvalConfig, cache: Row, served: str) -> None:
    """Raise `RolaqError` where rows would be labelled with another method, budget or model than is served.

    ``cache`` is what a copy of the model says of its packed cache, empty for a stock server.
    """
    method = cache.get("method", "bf16")
    there = {"method": method, "budget": cache.get("budget", cfg.server.budget)}
    for name, value in there.items():
        if (asked := getattr(cfg.server, name)) != value:
            raise RolaqError(
                f"the server's {name} is {value}, asked for was {asked}: give server.{name}={value}"
            )
    if cache and cfg.server.model is None and served != cfg.model.name:
        raise RolaqError(
            f"the server serves {served}, not {cfg.model.name}: give model={served}, or server.model={served} where "
            "they are the same"
        )


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
