"""The hooks of one `attach`: on the model, on each attention, on what expands its latents, on its indexer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.cache import install
from rolaq.quant.adapters.layers import EXPAND, MLALayer
from rolaq.quant.adapters.session import Forward, Session
from rolaq.quant.adapters.views import TwoViews

CACHE_NAMES = ("cache", "past_key_values")
"""What the cache is called: `past_key_values` in the older versions of transformers."""

Keywords = dict[str, Any]


class Hooks:
    """Everything that one attach registers, and what its hooks hand to each other within a forward."""

    def __init__(
        self, decoder: nn.Module, layers: list[MLALayer], readers: list[nn.Module], session: Session
    ) -> None:
        self.decoder, self.layers, self.readers, self.session = decoder, layers, readers, session
        self.config: Any = decoder.config
        self.cached: set[nn.Module] = set()
        """The attentions that were last called with a cache."""
        self.handles: list[Any] = []
        self._indexed: dict[nn.Module, Tensor] = {}
        self._expanded: dict[int, tuple[Tensor, Tensor]] = {}
        self._unasked: DynamicCache | None = None

    def install(self) -> None:
        """Register all hooks."""
        self._before(self.decoder, self.begin)
        self.handles.append(self.decoder.register_forward_hook(self.end, always_call=True))
        for module in [*(layer.module for layer in self.layers), *self.readers]:
            self._before(module, self.attend)
            if isinstance(indexer := getattr(module, "indexer", None), nn.Module):
                self._before(indexer, self.index)
                self.handles.append(indexer.register_forward_hook(self.select))
        for layer in self.layers:
            self.handles.append(getattr(layer.module, EXPAND).register_forward_pre_hook(self._expand(layer)))
        for module in self.readers:
            self.handles.append(getattr(module, EXPAND).register_forward_pre_hook(self.reread))

    def remove(self) -> None:
        """Remove all hooks; caches filled meanwhile refuse to go on."""
        self.session.open = False
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, hook: Callable[[nn.Module, Keywords], None]) -> None:
        """Register a hook that sees, and may change, all of a forward's arguments by name."""
        names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> tuple[tuple[()], Keywords]:
            named = dict(zip(names, args, strict=False)) | kwargs
            hook(module, named)
            return (), named

        self.handles.append(module.register_forward_pre_hook(call, with_kwargs=True))

    def begin(self, decoder: nn.Module, call: Keywords) -> None:
        """Model: put latent layers into its cache, note where padding ends."""
        given = next(
            (call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None), None
        )
        if given is None:
            return  # the model says what it misses
        queries, cache = given.shape[1], _cache(call)
        self.session.forward = Forward(0, queries)
        asked = self._asks_for_cache(call)
        if cache is None and (asked or self.session.views):
            parameters = inspect.signature(type(decoder).forward).parameters
            cache = DynamicCache(config=self.config)
            call[next(name for name in CACHE_NAMES if name in parameters)] = cache
            self._unasked = None if asked else cache
        past = 0
        if cache is not None:
            install(cache, self.layers, self.session)
            past = cache.layers[self.layers[0].cache_index].get_seq_length()
        self.session.forward = Forward.read(past, queries, call.get("attention_mask"))
        self._verify(self.session.forward)

    def _asks_for_cache(self, call: Keywords) -> bool:
        asked = call.get("use_cache")
        return bool(getattr(self.config, "use_cache", False) if asked is None else asked)

    @property
    def _attention(self) -> str:
        config: Any = self.layers[0].module.config
        return str(config._attn_implementation)

    def _verify(self, now: Forward) -> None:
        protection = self.session.protection
        if now.valid is not None and protection.recent and protection.reading != "per_query":
            raise RolaqError(
                f"attention_mask has padding after real tokens, where reading={protection.reading} has no place for "
                f"its last {protection.recent} tokens: pad on the left, or use reading=per_query"
            )
        if self.session.views and self._attention not in ("sdpa", "eager"):
            raise RolaqError(
                f"reading=per_query with recent={protection.recent} needs a mask per query, which attn_implementation="
                f"{self._attention} does not take: load the model with attn_implementation=sdpa"
            )

    def end(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Model: forget what only this forward needed. Its shape stays, for recomputation in the backward pass."""
        unasked, self._unasked = self._unasked, None
        if self.session.forward is not None:
            self.session.forward.masks.clear()
        self._indexed.clear()
        self._expanded.clear()
        # `generate` would go on with any cache that it finds in the output
        return output if unasked is None or output is None else _without(output, unasked)

    def attend(self, module: nn.Module, call: Keywords) -> None:
        """Attention: widen its mask to both views."""
        (self.cached.discard if _cache(call) is None else self.cached.add)(module)
        views, given = self.session.views, call.get("attention_mask")
        # a mask of padding alone [B, n] is for an indexer that builds the attention's mask from its selection
        if module not in self.cached or views is None or (given is not None and given.ndim == 2):
            return
        call["attention_mask"] = self._widened(views, given, call["hidden_states"])
        if given is not None and isinstance(indexer := getattr(module, "indexer", None), nn.Module):
            self._indexed[indexer] = given

    def _widened(self, views: TwoViews, given: Tensor | None, states: Tensor) -> Tensor:
        """The wide mask; layers that are given the same mask share it, one for each device."""
        now = self.session.under_way
        known, wide = now.masks.get(states.device, (None, None))
        if wide is None or known is not given:
            wide = views.mask(
                given, now.starts_on(states.device), states, additive=self._attention == "eager"
            )
            now.masks[states.device] = given, wide
        return wide

    def index(self, indexer: nn.Module, call: Keywords) -> None:
        """Indexer: it scores tokens, not views, and gets the narrow mask."""
        if (given := self._indexed.get(indexer)) is not None:
            call["attention_mask"] = given[:, 0]

    def select(self, indexer: nn.Module, args: Any, selected: Tensor) -> Tensor | None:
        """Indexer: the selected tokens in the view that each query reads."""
        if (views := self.session.views) is None or not self.cached:
            return None
        return views.select(selected, self.session.under_way.starts_on(selected.device))

    def _expand(
        self, layer: MLALayer
    ) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...] | None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            """Up-projection without a cache: here the latents are read."""
            if layer.module in self.cached:
                return None
            latent = args[0]
            tokens = latent[:, 0] if latent.ndim == 4 else latent
            read = self.session.expanded(tokens, layer.index).reshape(latent.shape)
            if self.readers:
                self._expanded[id(latent)] = latent, read
            return (read, *args[1:])

        return hook

    def reread(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Up-projection of another layer's latents: as that layer read them."""
        found = self._expanded.get(id(args[0]))
        return None if found is None else (found[1], *args[1:])


def _cache(call: Keywords) -> Any:
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


def _without(output: Any, cache: DynamicCache) -> Any:
    if isinstance(output, tuple):
        return tuple(part for part in output if part is not cache)
    return type(output)(**{name: part for name, part in output.items() if part is not cache})
