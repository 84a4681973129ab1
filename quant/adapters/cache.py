"""A Transformers cache layer that holds latents as the quantized cache would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.layers import MLALayer
from rolaq.quant.adapters.session import Session


class LatentCacheLayer(DynamicLayer):
    """`keys [B, 1, n, d]` are latents as stored, `values [B, 1, n, d_r]` the RoPE keys untouched.

    The first `written` columns have left the recent window: sinks among them are exact, the others were quantized,
    once, by the forward in which they left. The columns after them are exact.
    """

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, layer: MLALayer, session: Session) -> None:
        super().__init__()
        self.index, self.latent_dim, self.session = layer.index, layer.latent_dim, session
        self.written = 0
        self._last: tuple[int, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append latents `[B, 1, q, d]` and RoPE keys `[B, 1, q, d_r]`; return what the queries attend to.

        Raises:
            RolaqError: the attention caches something else than latents, or the cache outlived its `attach`.
        """
        self._verify(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past, before = self.get_seq_length(), self.keys
        self.keys = self._store(past, key_states)
        self.values = torch.cat((self.values, value_states), dim=2)
        if views := self.session.views:
            first = views.first
            exact = torch.cat((before[:, :, first:], key_states), dim=2) if past else key_states
            return views.join(self.keys, exact), views.join(self.values, self.values[:, :, first:])
        if self.session.protection.reading == "serving" and key_states.shape[2] > 1:
            return torch.cat((before, key_states), dim=2), self.values
        return self.keys, self.values

    def _store(self, past: int, latents: Tensor) -> Tensor:
        """The cache after appending: what leaves the window now is quantized now."""
        window = torch.cat((self.keys[:, :, self.written :], latents), dim=2) if past else latents
        total = past + latents.shape[2]
        leaving = self.session.protection.window_start(total) - self.written
        if leaving <= 0:
            return torch.cat((self.keys, latents), dim=2)
        exact = window[:, 0, :leaving]
        stored = self.session.stored(exact, self.index, self.written, total)
        # a crop may bring these back into the window; without a window nothing can be
        self._last = (self.written, exact) if self.session.protection.recent else None
        parts = (stored[:, None], window[:, :, leaving:])
        head = (self.keys[:, :, : self.written],) if self.written else ()
        self.written += leaving
        return torch.cat((*head, *parts), dim=2)

    def _verify(self, key_states: Tensor) -> None:
        if not self.session.open:
            raise RolaqError(
                "this cache was filled inside attach(...) and cannot be used after it: start a new cache"
            )
        if key_states.shape[1] != 1 or key_states.shape[-1] != self.latent_dim:
            raise RolaqError(
                f"transformers {transformers.__version__} caches expanded keys {list(key_states.shape)} here, not "
                "latents: install transformers>=5.17 (later for sparse attention), or pass use_cache=False and recent=0"
            )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.written, self._last = 0, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove tokens at the end. Those of the last forward that are in the window again become exact again."""
        super().crop(*args, **kwargs)
        kept = self.get_seq_length()
        self.written = min(self.written, kept)
        if self._last is None:
            return
        begin, exact = self._last
        edge = max(self.session.protection.window_start(kept), begin)
        if edge < self.written:
            restored = exact[:, None, edge - begin : self.written - begin]
            self.keys = torch.cat((self.keys[:, :, :edge], restored, self.keys[:, :, self.written :]), dim=2)
            self._last, self.written = (begin, exact[:, : edge - begin]), edge

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows, for beam search."""
        super().reorder_cache(beam_idx)
        self._last = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._last = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        self._last = None


class IndexedLatentCacheLayer(LatentCacheLayer, DynamicIndexedLayer):
    """The same beside an indexer's keys, for DeepSeek Sparse Attention."""


# A sliding layer keeps all its latents here: its window is in the attention mask either way.
_HOLDERS: dict[type, type[LatentCacheLayer]] = {
    DynamicLayer: LatentCacheLayer,
    DynamicSlidingWindowLayer: LatentCacheLayer,
    DynamicIndexedLayer: IndexedLatentCacheLayer,
}


def install(cache: Any, layers: Iterable[MLALayer], session: Session) -> None:
    """Make the cache's layers of the given attentions latent ones, in place; others are left as they are.

    Raises:
        RolaqError: a layer is of a kind that cannot hold latents, or holds tokens of another origin.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise RolaqError(f"a {type(cache).__name__} cannot hold latents: pass a DynamicCache, or none")
    for layer in layers:
        while len(cache.layers) <= layer.cache_index and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        present = cache.layers[layer.cache_index]
        if getattr(present, "session", None) is session:
            continue
        cache.layers[layer.cache_index] = _replacement(present, layer, session)


def _replacement(present: Any, layer: MLALayer, session: Session) -> LatentCacheLayer:
    kinds = {**_HOLDERS, **{holder: holder for holder in _HOLDERS.values()}}
    holder = kinds.get(type(present))
    if holder is None:
        raise RolaqError(
            f"cache layer {layer.cache_index} is a {type(present).__name__}, which cannot hold the latents of "
            f"{layer.name}: pass a DynamicCache, or none"
        )
    if present.get_seq_length():
        raise RolaqError(
            f"cache layer {layer.cache_index} already holds {present.get_seq_length()} tokens from outside this "
            "attach: start with an empty cache"
        )
    return holder(layer, session)
