"""A loaded model as an lm-eval model that reads its cache through a quantization method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM

from rolaq.eval.encoding import encode_pairs
from rolaq.eval.niah import quiet
from rolaq.quant.adapters.attach import attach
from rolaq.quant.protection import Protection

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rolaq.quant.methods.base import Method


class QuantizedLM(HFLM):
    """lm-eval's Hugging Face model under `attach`; one loaded model serves every method in turn.

    ``context`` bounds prompt plus generated tokens. Generation is greedy, padded on the left, with
    the latent cache; it ends at end-of-text, as the model's own generation does. With an exact method
    every call is the harness's own.

    Attributes:
        passed: is told the rows of every batch, for progress.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 1,
        context: int | None = None,
    ) -> None:
        with quiet():
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=context)
        self.method: Method | None = None
        self.protection = Protection(0, 0, "per_query")
        self.passed: Callable[[int], object] = lambda rows: None
        self._pairs: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._lengths: list[int] = []

    def use(self, method: Method, protection: Protection) -> QuantizedLM:
        """Read the cache through ``method`` from now on."""
        self.method, self.protection = method, protection
        return self

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within it the model reads through the method in use."""
        if self.method is None:
            yield
        else:
            with attach(self.model, self.method, self.protection):
                yield

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As the harness does it; texts are encoded once for all methods."""
        encode_pairs(self, self._pairs, [request.args for request in requests])
        return super().loglikelihood(requests, disable_tqdm)

    def forget(self) -> None:
        """Drop the encodings of `loglikelihood`, when the same requests will not come again."""
        self._pairs.clear()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        found = self._pairs.get((context, continuation))
        return super()._encode_pair(context, continuation) if found is None else found

    def _loglikelihood_tokens(self, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        join = huggingface.pad_and_concat

        def noted(longest: int, tensors: Sequence[Tensor], *more: Any, **options: Any) -> Tensor:
            self._lengths = [item.shape[-1] for item in tensors]
            return join(longest, tensors, *more, **options)

        # a batch is padded on the right without saying where: methods with statistics over tokens must know
        with patch.object(huggingface, "pad_and_concat", noted):
            return super()._loglikelihood_tokens(*args, **kwargs)

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self.attached():
            if self._needs_mask(inps):
                lengths = torch.tensor(self._lengths, device=inps.device)[:, None]
                mask = (torch.arange(inps.shape[1], device=inps.device) < lengths).long()
                with torch.no_grad():
                    logits = self.model(inps, attention_mask=mask).logits
            else:
                logits = super()._model_call(inps, *args, **kwargs)
        self.passed(len(inps))
        return logits

    def _needs_mask(self, inps: Tensor) -> bool:
        """Whether padding would show: not behind a causal mask, but in statistics over several tokens."""
        if self.method is None or self.method.exact or len(set(self._lengths)) < 2:
            return False
        by_token = getattr(self.method, "by_token", lambda tokens: False)
        tokenwise = by_token(inps.shape[1]) and self.protection.reading == "per_query"
        return len(self._lengths) == len(inps) and not tokenwise

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self.attached():
            generated = super()._model_generate(context, *args, **kwargs)
        self.passed(len(context))
        return generated

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: lm-eval's version asks the hub for the model's commit."""
        return {}
