"""Requests that a server must refuse with a clear error, and without harm to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolaq.serve.bench.client import Client, request


@dataclass(frozen=True)
class Bad:
    """A request: its JSON body or raw bytes; the statuses and a word that the server's error must hold."""

    name: str
    body: Any = None
    data: bytes | None = None
    word: str = ""
    path: str = "/generate"
    status: tuple[int, ...] = (400,)


def requests(context: int) -> list[Bad]:
    """One of each kind, for a server of this context."""
    few = [11, 12, 13]
    sampling = {"temperature": -1.0}, {"top_p": 7.0}, {"repetition_penalty": 9.0}, {"max_new_tokens": -3}
    return [
        Bad("prompt too long", request([11] * (context + 10), 4), word="longer than"),
        Bad("prompt far too long", request([11] * (40 * context), 4), word="longer than"),
        Bad("output too long", request(few, 10**9), word="context length"),
        Bad("token out of vocabulary", request([11, 10**9], 4), word="vocab"),
        Bad("negative token", request([11, -1], 4), word="vocab"),
        Bad("malformed JSON", data=b'{"input_ids": [1, 2'),
        Bad("not JSON", data=b"\x00\xff\xfe"),
        Bad("no prompt", {"sampling_params": {"max_new_tokens": 4}}),
        Bad("prompt of a wrong type", {"input_ids": {"a": 1}}),
        Bad(
            "wrong sampling type",
            {"input_ids": few, "sampling_params": {"temperature": "hot"}},
            status=(400, 500),
        ),
        *(Bad(f"sampling {one}", request(few, 4, sampling_params=one)) for one in sampling),
        Bad("unknown path", {}, path="/no/such/path", status=(404,)),
    ]


async def refusals(client: Client, bad: list[Bad]) -> list[str]:
    """Send each; returns what was wrong with the answers, one line each."""
    wrong = []
    for one in bad:
        status, answer = await client.post(one.path, one.body, one.data)
        text = str(answer)
        if status not in one.status or one.word not in text:
            wrong.append(f"{one.name}: {status} {text[:120]}")
    return wrong
