"""A long conversation with and without the prefix cache: the answers of every turn, compared.

Without the cache every turn is prefilled from its start, in chunks as long as a turn; so both runs read most
of the past from packed rows, and what remains different is the page in which a turn begins. The transcript
goes on with the same answers in both runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rolaq.serve.bench.agree import LOGPROBS, Greedy, count, verdict
from rolaq.serve.bench.client import connect
from rolaq.serve.bench.config import BenchConfig
from rolaq.serve.bench.measure import figure
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.small import server, tokens

BUDGET = "4+16"


def run(cfg: BenchConfig) -> list[Row]:
    """One row: the share of turns with the same answer."""
    talk = cfg.conversation
    text = tokens(cfg, talk.tokens)
    without = _serve(cfg, text, None, disable_radix_cache=True)
    cached = _serve(cfg, text, [one.ids for one, _ in without])
    judged = [verdict(one, other, talk.same) for (one, _), (other, _) in zip(without, cached, strict=True)]
    found = count(judged)
    share = (found["same"] + found["tie"]) / len(judged)
    hits = sum(hit for _, hit in cached)
    about = {"impl": "int2", "model": cfg.tiny.name, "budget": BUDGET, "mode": "context forced"}
    row = figure(
        "conversation", share, "share of turns", 1, talk.tokens, talk.answer, turns=len(judged), **found
    )
    return [{**about, **row, "cached_tokens": hits, "ok": share >= talk.share and hits > 0}]


def _serve(
    cfg: BenchConfig, text: list[int], answers: list[list[int]] | None, **more: bool
) -> list[tuple[Greedy, int]]:
    """Each turn's answer and how many of its tokens came from the cache; ``answers`` go into the transcript."""
    talk = cfg.conversation
    log = Path(cfg.output) / "logs" / f"conversation-{'cached' if answers else 'plain'}.log"
    options: dict[str, Any] = {
        "context_length": talk.tokens + talk.turn, "chunked_prefill_size": talk.turn, "max_total_tokens": 2 * talk.tokens, **more,
    }  # fmt: skip
    with server(cfg, BUDGET, log, **options) as running:
        return asyncio.run(_turns(cfg, text, answers, running.url))


async def _turns(
    cfg: BenchConfig, text: list[int], answers: list[list[int]] | None, url: str
) -> list[tuple[Greedy, int]]:
    talk, transcript, found = cfg.conversation, [], []
    asked = talk.turn - talk.answer
    async with connect(url) as client:
        for turn in range(talk.tokens // talk.turn):
            transcript += text[turn * asked : (turn + 1) * asked]
            answer = await client.generate(transcript, talk.answer, **LOGPROBS)
            output = Greedy.of(answer)
            found.append((output, int(answer["meta_info"].get("cached_tokens", 0))))
            transcript += answers[turn] if answers else output.ids
    return found
