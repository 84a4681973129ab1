"""A server on loopback that answers as SGLang does: tokens that follow from the prompt, at a known pace."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web

CONTEXT, VOCABULARY = 512, 4096


class StandIn:
    """Answers `/generate` and what the bench asks besides.

    pace: seconds a token; prefill: seconds a prompt token, one request at a time; fault: what it does wrong.
    """

    def __init__(self, pace=0.0, prefill=0.0, fault=None):
        self.pace, self.prefill, self.fault = pace, prefill, fault
        self.aborted, self.running, self.served, self.seen = set(), 0, 0, []
        self.turn = None

    def app(self):
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort),
                web.post("/flush_cache", self.flush),
                web.get("/model_info", self.model),
                web.get("/server_info", self.info),
                web.get("/v1/loads", self.loads),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    async def model(self, _):
        return web.json_response({"vocab_size": VOCABULARY})

    async def info(self, _):
        memory = {"token_capacity": 64000}
        state = {"context_length": CONTEXT, "internal_states": [{"memory_usage": memory}]}
        return web.json_response(state)

    async def loads(self, _):
        leaked = 64 if self.fault == "leak" else 0
        load = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "num_used_tokens": leaked}
        return web.json_response({"loads": [{**load, "max_total_num_tokens": 1200}]})

    async def metrics(self, _):
        return web.Response(text='sglang:num_retracted_requests_total{model_name="x"} 3.0\n')

    async def abort(self, request):
        body = await request.json()
        self.aborted |= {"*"} if body.get("abort_all") else {body["rid"]}
        return web.Response()

    async def flush(self, _):
        self.aborted.discard("*")
        return web.Response(status=400 if self.running else 200, text="busy")

    def token(self, ids, position):
        """The next token, which follows from the prompt; a faulty server's changes after a while."""
        shift = 1 if self.fault == "change" and self.served > 12 else 0
        return 20 + (sum(ids) * 31 + position * 7 + shift) % 4000

    def refusal(self, body):
        """Why a request is refused, or None."""
        ids, sampling = body.get("input_ids"), body.get("sampling_params", {})
        if not isinstance(ids, list) or not ids:
            return "no prompt"
        if len(ids) >= CONTEXT:
            return f"The input ({len(ids)} tokens) is longer than the model's context length"
        if max(ids) >= VOCABULARY or min(ids) < 0:
            return "greater than the vocab size"
        most = {"temperature": 9, "top_p": 1, "repetition_penalty": 2, "max_new_tokens": 2**40}
        for name, bound in most.items():
            value = sampling.get(name, 1)
            if isinstance(value, str) or not 0 <= value <= bound:
                return f"sampling: {name}"
        return "exceeds the context length" if sampling["max_new_tokens"] + len(ids) > CONTEXT else None

    async def generate(self, request):
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"message": "JSON"}, status=400)
        if (reason := self.refusal(body)) is not None:
            status = 200 if self.fault == "accept" else 400
            return web.json_response({"message": reason}, status=status)
        self.seen.append(body)
        self.running += 1
        try:
            return await (self.streamed if body.get("stream") else self.whole)(request, body)
        except ConnectionResetError:  # the client went away
            return web.Response()
        finally:
            self.running -= 1
            self.served += 1

    async def _prefill(self, ids):
        self.turn = self.turn or asyncio.Lock()
        async with self.turn:
            await asyncio.sleep(self.prefill * len(ids))

    def gone(self, body):
        return "*" in self.aborted or body.get("rid") in self.aborted

    def chunk(self, body, begin, end):
        ids = [self.token(body["input_ids"], p) for p in range(begin, end)]
        return {"output_ids": ids, "meta_info": {"completion_tokens": end}}

    async def whole(self, _, body):
        count = body["sampling_params"]["max_new_tokens"]
        await self._prefill(body["input_ids"])
        answer = self.chunk(body, 0, count)
        if body.get("return_logprob"):
            logprobs = [[-0.5, token, None] for token in answer["output_ids"]]
            answer["meta_info"]["output_token_logprobs"] = logprobs
            answer["meta_info"]["output_top_logprobs"] = [[one, [-2.5, 1, None]] for one in logprobs]
        answer["meta_info"]["cached_tokens"] = len(body["input_ids"]) // 64 * 64
        return web.json_response(answer)

    async def streamed(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._prefill(body["input_ids"])
        count, done = body["sampling_params"]["max_new_tokens"], 0
        while done < count and not self.gone(body):
            step = 1 if done == 0 else min(8, count - done)
            await asyncio.sleep(self.pace * step)
            part = self.chunk(body, done, done + step)
            done += step
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def serving(stand_in):
    """The address of a `StandIn` that runs in a thread of its own."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def start():
        runner = web.AppRunner(stand_in.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found["port"] = site._server.sockets[0].getsockname()[1]
        found["runner"] = runner
        ready.set()

    def run():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        asyncio.run_coroutine_threadsafe(found["runner"].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
