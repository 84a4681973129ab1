"""A running OpenAI-compatible server as an lm-eval model: likelihoods and greedy generation."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from rolaq.common.errors import RolaqError, one_line
from rolaq.eval.encoding import encode_pairs
from rolaq.eval.task_config import ServerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTEMPTS = 3
KEY_VARIABLE = "ROLAQ_API_KEY"
"""Holds the key of a server that asks for one, as for `make serve`."""


class ServerLM(TemplateLM):
    """Sends token ids, so that prompts are those of the simulation.

    SGLang's own ``/generate`` is used where the server has it: it scores the continuation alone and keeps
    its prefix cache. Any other server is asked for ``/v1/completions`` with ``echo`` and ``logprobs``.

    Attributes:
        passed: is told the rows of every finished request, for progress.

    Raises:
        RolaqError: the server cannot be reached, or does not answer as expected.
    """

    backend = "causal"
    max_gen_toks = 256

    def __init__(self, cfg: ServerConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        super().__init__()
        self.cfg, self.tokenizer, self.max_length = cfg, tokenizer, context
        self.add_bos_token: bool | None = None
        self.passed: Callable[[int], object] = lambda rows: None
        self.url = cfg.url.rstrip("/")
        # the name in newer versions, and in older ones
        names = ("/model_info", "/get_model_info")
        self.native = any(self._ask(path, optional=True) is not None for path in names)
        self.served = cfg.model or self._served()
        self._pairs: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before an empty context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches of chat prompts."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(self, history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one prompt."""
        options = {"add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        return str(self.tokenizer.apply_chat_template(history, tokenize=False, **options))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval does it, with texts encoded together."""
        encode_pairs(self, self._pairs, [request.args for request in requests])
        return super().loglikelihood(requests, disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        found = self._pairs.get((context, continuation))
        return super()._encode_pair(context, continuation) if found is None else found

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        return self._all(self._score, [(context, answer) for _, context, answer in requests], len(requests))

    def _score(self, pair: tuple[list[int], list[int]]) -> tuple[float, bool]:
        """Log-probability of the continuation, and whether it is the greedy one."""
        context, answer = pair
        ids = (context + answer)[-(self.max_length - 1) :]
        start = len(ids) - len(answer)
        if self.native:
            body: dict[str, Any] = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            }
            more = {"return_logprob": True, "logprob_start_len": start - 1, "top_logprobs_num": 1}
            meta = self._ask("/generate", {**body, **more})["meta_info"]
            # the entry at the start itself has no probability: nothing before it was scored
            scored = meta["input_token_logprobs"][1 : len(answer) + 1]
            best = meta["input_top_logprobs"][1 : len(answer) + 1]
            greedy = all(top[0][1] == token for top, token in zip(best, answer, strict=True))
            return self._sum([item[0] for item in scored], len(answer)), greedy
        body = {
            "model": self.served,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
        }
        found = self._ask("/v1/completions", body)["choices"][0]["logprobs"]
        values = found["token_logprobs"][start : len(ids)]
        tops = [max(top.values()) for top in found["top_logprobs"][start : len(ids)]]
        return self._sum(values, len(answer)), values == tops

    def _sum(self, values: Sequence[float | None], wanted: int) -> float:
        if len(values) != wanted or None in values:
            raise RolaqError(
                f"{self.url} gave {len(values)} of {wanted} log-probabilities: it cannot score prompts"
            )
        return float(sum(value for value in values if value is not None))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Not needed by any benchmark here."""
        raise RolaqError("perplexity through a server is not measured: use backend=simulated")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, each ended at its first stop sequence."""
        return self._all(self._generate, [request.args for request in requests], len(requests))

    def _generate(self, arguments: tuple[str, dict[str, Any]]) -> str:
        text, options = arguments
        wanted = normalize_gen_kwargs(dict(options), self.max_gen_toks)
        new = wanted["max_gen_toks"]
        stop = handle_stop_sequences(wanted.get("until"), eos=self.tokenizer.decode([self.eot_token_id]))
        ids = self.tok_encode(text)[-(self.max_length - new) :]
        if self.native:
            sampling = {"max_new_tokens": new, "temperature": 0, "stop": stop}
            answer = self._ask("/generate", {"input_ids": ids, "sampling_params": sampling})["text"]
        else:
            body = {
                "model": self.served,
                "prompt": ids,
                "max_tokens": new,
                "temperature": 0,
                "stop": stop[:4],
            }
            answer = self._ask("/v1/completions", body)["choices"][0]["text"]
        return postprocess_generated_text(generation=answer, stop=stop, think_end_token=None)

    def _all(self, ask: Callable[[Any], Any], items: list[Any], rows: int) -> list[Any]:
        """Requests in flight together, answers in order."""

        def one(item: Any) -> Any:
            answer = ask(item)
            self.passed(1)
            return answer

        with ThreadPoolExecutor(self.cfg.concurrency) as pool:
            return list(pool.map(one, items))

    def _served(self) -> str:
        models = self._ask("/v1/models")["data"]
        if not models:
            raise RolaqError(f"{self.url} serves no model")
        return str(models[0]["id"])

    def _ask(self, path: str, body: Any = None, optional: bool = False) -> Any:
        """The JSON answer to a request, tried again when the connection breaks; None of an ``optional`` path."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.cfg.timeout) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if optional:
                    return None
                said = one_line(error.read().decode("utf-8", "replace"), 200)
                raise RolaqError(f"{self.url}{path} answered {error.code}: {said}") from error
            except (OSError, ValueError) as error:
                if attempt == ATTEMPTS:
                    raise RolaqError(
                        f"no answer from server.url={self.url} ({one_line(error, 120)}): start it with `make serve`, "
                        "or give its address"
                    ) from error
        raise AssertionError("unreachable")
