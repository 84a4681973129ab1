"""SGLang's native `/generate` over HTTP, streamed, with the times at which tokens arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rolaq.common.errors import RolaqError, one_line
from rolaq.serve.bench.stats import Timeline

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Client:
    """Requests of one server; made by `connect`."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def stream(
        self,
        ids: Sequence[int],
        tokens: int,
        rid: str | None = None,
        into: Timeline | None = None,
        **options: Any,
    ) -> Timeline:
        """Generate ``tokens`` greedily after ``ids`` and note when they arrive, in ``into`` if it is given.

        ``options`` are further fields of the request. A refusal ends up in the timeline's ``error``.
        """
        line = into or Timeline()
        line.sent = time.perf_counter()
        async for chunk in self.chunks(ids, tokens, rid, **options):
            if "error" in chunk:
                line.error = str(chunk["error"].get("message", chunk["error"]))
                break
            line.info = chunk["meta_info"]
            count = int(line.info.get("completion_tokens", 0))
            part = chunk.get("output_ids", [])
            # with incremental streaming a chunk holds its own tokens, otherwise all so far
            line.ids = part if len(part) == count else line.ids + part
            if count and (not line.samples or count > line.samples[-1][1]):
                line.samples.append((time.perf_counter(), count))
        return line

    async def chunks(
        self, ids: Sequence[int], tokens: int, rid: str | None = None, **options: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed answer as they come; an answer that is no stream gives its error alone."""
        body = request(ids, tokens, rid, stream=True, **options)
        async with self._answer("POST", "/generate", json=body) as answer:
            if answer.status != 200:
                yield {"error": {"message": one_line(await answer.text(), 200), "status": answer.status}}
                return
            async for raw in answer.content:
                text = raw.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text[6:])

    async def generate(self, ids: Sequence[int], tokens: int, rid: str | None = None, **options: Any) -> Any:
        """The whole answer at once.

        Raises:
            RolaqError: the server refused; gives its status and words.
        """
        status, answer = await self.post("/generate", request(ids, tokens, rid, **options))
        if status != 200:
            raise RolaqError(f"the server answered {status}: {one_line(str(answer), 200)}")
        return answer

    async def post(self, path: str, body: Any = None, data: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON (else text) of a POST with a JSON body, or with raw ``data``."""
        options: dict[str, Any] = {"json": body} if data is None else {"data": data}
        if data is not None:
            options["headers"] = {"Content-Type": "application/json"}
        async with self._answer("POST", path, **options) as answer:
            return answer.status, _parsed(await answer.text())

    async def get(self, path: str) -> Any:
        """JSON (else text) of a GET."""
        async with self._answer("GET", path) as answer:
            return _parsed(await answer.text())

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **options: Any) -> AsyncIterator[ClientResponse]:
        """The answer to a request.

        Raises:
            RolaqError: the server does not answer, or breaks off.
        """
        from aiohttp import ClientError

        try:
            async with self.session.request(method, self.url + path, **options) as answer:
                yield answer
        except (ClientError, OSError) as error:
            raise RolaqError(f"no answer from {self.url}{path}: {type(error).__name__} {error}") from error

    async def abort_all(self) -> None:
        """Abort every request of the server."""
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def flush(self, wait_s: float = 60.0) -> None:
        """Empty the prefix cache, once no request is left.

        Raises:
            RolaqError: requests are still there after ``wait_s`` seconds.
        """
        end, text = time.monotonic() + wait_s, ""
        while time.monotonic() < end:
            status, text = await self.post("/flush_cache")
            if status == 200:
                return
            await asyncio.sleep(0.3)
        raise RolaqError(f"the server did not become idle in {wait_s:g} s: {one_line(str(text), 200)}")


def request(ids: Sequence[int], tokens: int, rid: str | None = None, **options: Any) -> dict[str, Any]:
    """The body of a `/generate` request; ``sampling_params`` in ``options`` add to greedy ones."""
    sampling = {**GREEDY, "max_new_tokens": tokens, **options.pop("sampling_params", {})}
    body = {"input_ids": list(ids), "sampling_params": sampling, **options}
    return {**body, "rid": rid} if rid else body


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@asynccontextmanager
async def connect(url: str, key: str | None = None) -> AsyncIterator[Client]:
    """A client of the server at ``url``, with as many connections as it needs and no time limit."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # a connection each: a server may close one that it has answered with an error
    connector, patience = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=patience, read_bufsize=1 << 22
    ) as session:
        yield Client(session, url)


async def gather(awaitables: Iterable[Any]) -> list[Any]:
    """All results, in order."""
    return list(await asyncio.gather(*awaitables))
