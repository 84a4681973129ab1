"""A loaded model as an lm-eval model that reads its cache through a quantization method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM

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
    the latent cache; it ends at end-of-text, as the model's own generation does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        context: int | None = None,
    ) -> None:
        with quiet():
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=context)
        self.method: Method | None = None
        self.protection = Protection(0, 0, "per_query")

    def use(self, method: Method, protection: Protection) -> QuantizedLM:
        """Read the cache through ``method`` from now on."""
        self.method, self.protection = method, protection
        return self

    @contextmanager
    def _attached(self) -> Iterator[None]:
        if self.method is None:
            yield
        else:
            with attach(self.model, self.method, self.protection):
                yield

    def _model_call(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._attached():
            return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._attached():
            return super()._model_generate(*args, **kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """Nothing: lm-eval's version asks the hub for the model's commit."""
        return {}
