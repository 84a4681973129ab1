"""Mixed traffic at saturation: plain, shared prefixes, long outputs, aborts, disconnects, bad requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rolaq.common.errors import RolaqError
from rolaq.serve.bench.bad import Bad, refusals
from rolaq.serve.bench.client import Client

Kind = Callable[["Traffic", Client], Awaitable[None]]


@dataclass
class Traffic:
    """A stream of random requests until `stop`.

    Attributes:
        text: tokens that prompts are cut from.
        context: longest sequence of the server.
        bad: requests to be refused.
        sent: requests by kind.
        wrong: what went wrong with those that should have succeeded, and with refusals.
    """

    text: Sequence[int]
    context: int
    bad: list[Bad]
    stop: float
    seed: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random, self.short, self.half = random.Random(self.seed), self.context // 10, self.context // 2
        self.shared = [self._cut(self.random.randint(self.short, self.half)) for _ in range(6)]

    async def client(self, client: Client) -> None:
        """One of the clients: a request of a random kind after the other."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        while time.monotonic() < self.stop:
            name = self.random.choices(kinds, [weight for _, weight in weights])[0]
            self.sent[name] += 1
            try:
                await KINDS[name][0](self, client)
            except (TimeoutError, RolaqError) as error:
                self.wrong.append(f"{name}: {error or type(error).__name__}")
                await asyncio.sleep(0.5)  # a dead server shall not fill the list

    def _cut(self, length: int) -> list[int]:
        start = self.random.randrange(max(1, len(self.text) - length))
        return list(self.text[start : start + length])

    async def _complete(self, client: Client, ids: list[int], tokens: int, **sampling: float) -> None:
        """A request that must give exactly so many tokens."""
        line = await client.stream(ids, tokens, sampling_params=sampling)
        if line.error or len(line.ids) != tokens:
            self.wrong.append(f"{len(ids)} tokens in: {len(line.ids)} of {tokens} out, {line.error}")

    async def plain(self, client: Client) -> None:
        """Short or long prompts, greedy or sampled."""
        length = self.random.choice((1, 2, 40, 64, 65, self.short, self.half))
        sampling = self.random.choice(
            ({}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20})
        )
        await self._complete(client, self._cut(length), self.random.randint(1, self.short), **sampling)

    async def prefix(self, client: Client) -> None:
        """A prompt that begins as others do."""
        ids = [*self.random.choice(self.shared), *self._cut(self.random.randint(1, self.short))]
        await self._complete(client, ids, self.random.randint(1, self.short // 2))

    async def long(self, client: Client) -> None:
        """Long outputs: several of them do not fit into the pool together, so that some are retracted."""
        await self._complete(client, self._cut(self.random.randint(10, self.short)), self.half)

    async def abort(self, client: Client) -> None:
        """Aborted by its id, waiting or running."""
        name = f"abort-{self.random.random()}"
        asked = asyncio.create_task(client.stream(self._cut(self.short), self.half, name))
        try:
            await asyncio.sleep(self.random.choice((0.0, 0.05, 0.3, 1.0)))
            await client.post("/abort_request", {"rid": name})
            line = await asyncio.wait_for(asked, 120)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        if len(line.ids) > self.half:
            self.wrong.append(f"an aborted request went on to {len(line.ids)} tokens")

    async def disconnect(self, client: Client) -> None:
        """The client goes away after some chunks, or before the first."""
        left = self.random.choice((0, 1, 5))
        asked = client.chunks(self._cut(self.short), self.half)
        task = asyncio.create_task(_read(asked, left))
        await asyncio.wait([task], timeout=self.random.choice((0.02, 0.5, 3.0)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def refuse(self, client: Client) -> None:
        """A bad request."""
        self.wrong += await refusals(client, [self.random.choice(self.bad)])


async def _read(chunks, count: int) -> None:
    """Read so many chunks and leave."""
    seen = 0
    async for _ in chunks:
        seen += 1
        if seen > count:
            break
    await chunks.aclose()


# kind: what it does, and its share
KINDS: dict[str, tuple[Kind, int]] = {
    "plain": (Traffic.plain, 30),
    "prefix": (Traffic.prefix, 25),
    "long": (Traffic.long, 20),
    "abort": (Traffic.abort, 10),
    "disconnect": (Traffic.disconnect, 10),
    "refuse": (Traffic.refuse, 5),
}
