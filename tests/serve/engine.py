"""SGLang's engine in this process, driven step by step: its scheduler, prefix cache, pools and model runner.

Only the processes around it are missing (HTTP server, tokenizer, detokenizer): requests come as token ids,
and their state is read off SGLang's own request objects.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import launch
import pytest
import torch
from plugin_hooks import Hooks
from torch import Tensor

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here: make test-serve", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("SGLang's engine runs on the CPU in these tests, a GPU is here", allow_module_level=True)

DEFAULTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "page_size": 64,
    "chunked_prefill_size": 256,
    "max_running_requests": 8,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.5,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "log_level": "error",
}


class _Inbox:
    """Stands where SGLang's request receiver stands: its event loop waits here before every step."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.closed = False

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        self.done.release()
        self.go.acquire()
        if self.closed:
            raise SystemExit
        messages, self.messages = self.messages, []
        return [*local_reqs, *messages]


class CpuEngine:
    """One engine.

    Args:
        model: folder of the checkpoint and its tokenizer.
        plugin: a function that registers SGLang hooks; they hold for this engine alone.
        server_args: SGLang's server arguments, over `DEFAULTS`.

    Attributes:
        scheduler, runner, pool, tree, slots: SGLang's scheduler, model runner, cache pool, prefix cache and
            allocator of cache slots.
        requests: SGLang's request objects by id.
        logits: by request id, then by number of tokens seen: the row of logits `[vocabulary]` that followed.
    """

    alive = False

    def __init__(self, model: str, plugin: Callable[[], None] | None = None, **server_args: Any) -> None:
        assert not CpuEngine.alive, "a process has room for one engine: close the other first"
        self.hooks = Hooks(plugin)
        try:
            self.scheduler = launch.start(DEFAULTS | {"model_path": str(model)} | server_args)
        except BaseException:
            self.hooks.undo()
            launch.reset()
            raise
        CpuEngine.alive = True
        self.requests: dict[str, Any] = {}
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.inbox = self.scheduler.request_receiver = _Inbox()
        self._listen()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()
        self._wait()

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    @property
    def pool(self) -> Any:
        return self.runner.token_to_kv_pool

    @property
    def tree(self) -> Any:
        return self.scheduler.tree_cache

    @property
    def slots(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    def submit(self, rid: str, tokens: Sequence[int], max_new_tokens: int = 16, **sampling: Any) -> None:
        """Hand in a request; it enters at the next step. Greedy and without end of text unless told otherwise."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        options = {"temperature": 0, "ignore_eos": True, "max_new_tokens": max_new_tokens} | sampling
        params = SamplingParams(**options)
        params.normalize(self.scheduler.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        self.inbox.messages.append(
            TokenizedGenerateReqInput(
                rid=rid, input_text=None, input_ids=array("q", tokens), input_embeds=None, mm_inputs=None,
                token_type_ids=None, sampling_params=params, return_logprob=False, logprob_start_len=-1,
                top_logprobs_num=0, token_ids_logprob=None, stream=False,
            )
        )  # fmt: skip

    def abort(self, rid: str = "") -> None:
        """Abort a request, or all of them, at the next step."""
        from sglang.srt.managers.io_struct import AbortReq

        self.inbox.messages.append(AbortReq(rid=rid, abort_all=not rid))

    def step(self, steps: int = 1) -> None:
        """Let the event loop go round.

        Raises:
            RuntimeError: SGLang's scheduler failed (its exception is the cause).
        """
        for _ in range(steps):
            self.inbox.go.release()
            self._wait()

    def run(self, most: int = 2000) -> None:
        """Steps until nothing is left to do; the last ones are idle, when SGLang counts its slots."""
        for _ in range(most):
            self.step()
            if self.scheduler.is_fully_idle() and not self.inbox.messages and not self.scheduler.last_batch:
                return self.step(2)
        raise RuntimeError(f"requests still unfinished after {most} steps")

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 16, **sampling: Any
    ) -> list[list[int]]:
        """New tokens of each prompt (token ids), all requests at once."""
        names = [f"generate-{len(self.requests)}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.submit(name, prompt, max_new_tokens, **sampling)
        self.run()
        return [list(self.requests[name].output_ids) for name in names]

    def close(self) -> None:
        """End the event loop; give the process back its state. A closed engine cannot go on."""
        if self.thread.is_alive():
            self.inbox.closed = True
            self.inbox.go.release()
            self.thread.join()
        self.hooks.undo()
        launch.reset()
        CpuEngine.alive = False

    def _listen(self) -> None:
        """Note requests as they enter, and logits as they are made."""
        add, run = self.scheduler._add_request_to_queue, self.scheduler.run_batch

        def add_request_to_queue(req: Any, *arguments: Any, **more: Any) -> None:
            self.requests[req.rid] = req
            add(req, *arguments, **more)

        def run_batch(batch: Any, *arguments: Any, **more: Any) -> Any:
            seen = [
                (req.rid, length) for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
            ]
            result = run(batch, *arguments, **more)
            for (rid, length), row in zip(seen, result.logits_output.next_token_logits, strict=True):
                self.logits.setdefault(rid, {})[length] = row.clone()
            return result

        self.scheduler._add_request_to_queue, self.scheduler.run_batch = add_request_to_queue, run_batch

    def _loop(self) -> None:
        try:
            self.scheduler.run_event_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.inbox.error = error
            self.inbox.done.release()

    def _wait(self) -> None:
        self.inbox.done.acquire()
        if self.inbox.error:
            raise RuntimeError("SGLang's scheduler failed") from self.inbox.error
