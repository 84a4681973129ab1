"""Serve prompts and leave every forward's logits for the simulation (`compare`), and compare the codes.

Three ways to prefill: `whole` (one chunk, all prompts at once), `chunks` (many chunks, one prompt after the
other) and `prefix` (the first two thirds come from the prefix cache, left there by `whole`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.common.files import read_json, write_json
from rolaq.serve.bench.client import Client, connect, gather
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.measure import figure
from rolaq.serve.bench.probe import Probe
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.small import STOCK, prompts, server

PAGE = 64


@dataclass(frozen=True)
class Job:
    """One server: a budget (None for BF16), the ways to prefill that it serves, its arguments."""

    budget: str | None
    modes: tuple[str, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.budget or STOCK}-{self.modes[0]}"


def jobs(cfg: BenchConfig) -> list[Job]:
    """The servers of a parity run. Those with many chunks decode without CUDA graphs, so that every write is
    compared; the others decode with them."""
    whole = {"chunked_prefill_size": -1}
    chunks = {"chunked_prefill_size": cfg.parity.chunk, "disable_decode_cuda_graph": True}
    found = [Job(None, ("whole",), whole)]
    for budget in cfg.parity.budgets:
        found += [Job(budget, ("whole", "prefix"), whole), Job(budget, ("chunks",), chunks)]
    return found


def run(cfg: BenchConfig) -> list[Row]:
    """Serve all jobs; returns a row for the codes of each budget. The KL comes from `compare`."""
    lengths = [n for n in cfg.parity.lengths for _ in range(cfg.parity.per_length)]
    texts = prompts(cfg, [2 * n for n in lengths])
    folder = Path(cfg.parity.folder)
    with ThreadPoolExecutor(cfg.parity.parallel) as pool:
        done = list(pool.map(lambda job: _serve(cfg, job, texts, folder), jobs(cfg)))
    write_json(folder / "jobs.json", [asdict(job) for job in done])
    return codes(cfg, done, folder)


def _serve(cfg: BenchConfig, job: Job, texts: list[list[int]], folder: Path) -> Job:
    path = folder / job.name
    # the plugin's pool is there for packed budgets alone
    probe = Probe(logits=f"{path}.logits", codes=f"{path}.codes.json" if job.budget else None)
    with server(cfg, job.budget, folder / f"{job.name}.log", probe, **job.arguments) as running:
        write_json(Path(f"{path}.json"), asyncio.run(_answers(cfg, job, texts, running.url)))
    print(f"parity: served {job.name}", flush=True)
    return job


async def _answers(cfg: BenchConfig, job: Job, texts: list[list[int]], url: str) -> list[dict[str, Any]]:
    """Prompt and output of every request, by its id."""
    found = []
    async with connect(url) as client:
        for mode in job.modes:
            ids = [prompt_of(text, mode) for text in texts]
            found += await _serve_mode(client, mode, ids, cfg.parity.new_tokens)
    return found


async def _serve_mode(
    client: Client, mode: str, ids: Sequence[list[int]], count: int
) -> list[dict[str, Any]]:
    names = [f"{mode}-{n}" for n in range(len(ids))]
    asked = [client.generate(prompt, count, name) for name, prompt in zip(names, ids, strict=True)]
    answers = await gather(asked) if mode == "whole" else [await one for one in asked]
    return [
        {"rid": name, "mode": mode, "prompt": prompt, "output": answer["output_ids"]}
        for name, prompt, answer in zip(names, ids, answers, strict=True)
    ]


def prompt_of(text: Sequence[int], mode: str) -> list[int]:
    """The first half of a text; for `prefix`, whole pages of two thirds of it, and then other text."""
    length = len(text) // 2
    if mode != "prefix":
        return list(text[:length])
    kept = cached_tokens(length)
    return [*text[:kept], *text[length : 2 * length - kept]]


def cached_tokens(length: int) -> int:
    """Tokens of a `prefix` prompt that the prefix cache should have."""
    return max(length * 2 // 3 // PAGE, 1) * PAGE


def codes(cfg: BenchConfig, done: Sequence[Job], folder: Path) -> list[Row]:
    """Codes in the pools that differ from the reference quantizer's on the same latents, by budget.

    Those on a quantizer boundary, where sums in another order may round differently, are counted apart.

    Raises:
        RolaqError: a server left no comparison.
    """
    rows = []
    for job in done:
        if job.budget is None:
            continue
        path = folder / f"{job.name}.codes.json.0"
        if not path.is_file():
            raise RolaqError(f"{path} is missing: the server of {job.name} compared no codes")
        found = read_json(path)
        wrong = found["wrong"] + found["parameters_wrong"] + found["rope_wrong"]
        about = {
            "model": cfg.tiny.name,
            "impl": "int2",
            "budget": job.budget,
            "mode": job.modes[0],
            "ok": wrong == 0,
        }
        more = {key: found[key] for key in ("coordinates", "writes")}
        rows.append(
            {
                **about,
                **figure(
                    "parity_codes", wrong, "codes", on_boundary=found["differ"] - found["wrong"], **more
                ),
            }
        )
    return rows


def read_jobs(folder: Path) -> list[Job]:
    """The jobs that were served into a folder.

    Raises:
        RolaqError: there are none.
    """
    path = folder / "jobs.json"
    if not path.is_file():
        raise RolaqError(f"{path} is missing: serve first (run=[parity])")
    return [Job(**{**job, "modes": tuple(job["modes"])}) for job in read_json(path)]


def index_of(path: Path) -> list[dict[str, Any]]:
    """The lines beside a logits file."""
    return [json.loads(line) for line in path.with_name(path.name + ".jsonl").read_text("utf8").splitlines()]
