"""What is shared by the hooks and cache layers of one `attach`: the method and the forward under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.adapters.views import TwoViews
from rolaq.quant.methods.base import Method
from rolaq.quant.protection import Protection


@dataclass
class Forward:
    """One forward of the model: `queries` new tokens after `past` cached ones.

    `starts` holds the column of each row's first real token (one value when they agree); `valid` marks the real
    tokens among all columns, `[B, total]`, and is None where nothing but the left padding is missing.
    """

    past: int
    queries: int
    starts: tuple[int, ...] = (0,)
    valid: Tensor | None = None
    masks: dict[torch.device, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    _starts: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Columns after this forward."""
        return self.past + self.queries

    def starts_on(self, device: torch.device) -> Tensor:
        """`starts` as a tensor, `[B]` or `[1]`."""
        if device not in self._starts:
            self._starts[device] = torch.tensor(self.starts, device=device)
        return self._starts[device]

    @cached_property
    def rows(self) -> list[tuple[int, list[int]]]:
        """Each start with its rows."""
        return [
            (s, [row for row, start in enumerate(self.starts) if start == s])
            for s in sorted(set(self.starts))
        ]

    @classmethod
    def read(cls, past: int, queries: int, mask: Any) -> Self:
        """From the padding mask that the model was given, `[B, past + queries]` or None.

        Raises:
            RolaqError: the mask is of another shape.
        """
        if mask is None:
            return cls(past, queries)
        total = past + queries
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < total:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise RolaqError(
                f"attention_mask is {shape}, not [batch, {total}]: pass the padding mask of all tokens, or none"
            )
        real = mask[:, :total] != 0
        left = (real.cumsum(1) == 0).sum(1)
        # one transfer for everything that has to be known on the host
        *starts, holes = torch.cat((left, (total - left - real.sum(1)).sum()[None])).tolist()
        agreed = (starts[0],) if len(set(starts)) == 1 else tuple(starts)
        return cls(past, queries, agreed, real if holes else None)


class Session:
    """One `attach`: quantizes write events and knows the forward under way. Not copied with the caches it owns."""

    def __init__(self, method: Method, protection: Protection) -> None:
        self.method, self.protection = method, protection
        self.forward: Forward | None = None
        self.open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self

    @property
    def under_way(self) -> Forward:
        """The forward under way, which hooks inside the model may count on."""
        assert self.forward is not None
        return self.forward

    @property
    def views(self) -> TwoViews | None:
        """The two views that the forward under way needs, or None where the cache alone serves every query."""
        now = self.forward
        if now is None or self.protection.reading != "per_query" or not self.protection.recent:
            return None
        if now.queries == 1 or now.total <= self.protection.recent:
            return None
        return TwoViews(now.past, now.total, self.protection)

    def expanded(self, latent: Tensor, layer: int) -> Tensor:
        """What a forward without a cache expands instead of its latents `[B, n, d]`.

        Raises:
            RolaqError: the queries need windows of their own, which only a cache can give them.
        """
        tokens = latent.shape[1]
        reading, recent = self.protection.reading, self.protection.recent
        if reading == "serving" and tokens > 1:
            return latent
        if reading == "per_query" and 0 < recent < tokens and tokens > 1:
            raise RolaqError(
                f"reading=per_query with recent={recent} needs the model's cache, which gradient checkpointing and "
                "layers called by themselves do without: use recent=0 or reading=storage there"
            )
        edge = self.protection.window_start(tokens)
        return (
            torch.cat((self.stored(latent[:, :edge], layer, 0, tokens), latent[:, edge:]), dim=1)
            if edge
            else latent
        )

    def stored(self, latent: Tensor, layer: int, first: int, total: int) -> Tensor:
        """The latents of one write event as they are stored: sinks and left padding exact, the rest quantized.

        Args:
            latent: `[B, n, d]`, the columns `first … first + n - 1`.
            layer: index among the MLA layers.
            total: columns after the forward that this is part of.
        """
        now, end = self._matching(latent.shape[0], total), first + latent.shape[1]
        if len(now.starts) > 1 and self._by_token(latent.shape[1]):
            columns = torch.arange(first, end, device=latent.device)
            exact = columns < now.starts_on(latent.device)[:, None] + self.protection.sink
            return torch.where(exact[..., None], latent, self._reconstruct(latent, layer, first, None))
        valid = None if now.valid is None else now.valid[:, first:end].to(latent.device)
        if len(now.starts) == 1:
            return self._stored_rows(latent, layer, first, now.starts[0], valid)
        stored = latent
        for start, rows in now.rows:
            index = torch.tensor(rows, device=latent.device)
            real = None if valid is None else valid[index]
            stored = stored.index_copy(0, index, self._stored_rows(latent[index], layer, first, start, real))
        return stored

    def _stored_rows(
        self, latent: Tensor, layer: int, first: int, start: int, valid: Tensor | None
    ) -> Tensor:
        """The same for rows that all begin at column `start`."""
        skip = max(start + self.protection.sink - first, 0)
        if skip >= latent.shape[1]:
            return latent
        valid = None if valid is None else valid[:, skip:]
        written = self._reconstruct(latent[:, skip:], layer, first + skip - start, valid)
        if (
            valid is not None
        ):  # padding may come back as NaN, which even an attention weight of zero lets through
            written = torch.where(valid[..., None], written, latent[:, skip:])
        return torch.cat((latent[:, :skip], written), dim=1)

    def _by_token(self, tokens: int) -> bool:
        """Whether rows that begin at different columns may be quantized in one call."""
        return getattr(self.method, "by_token", lambda _: False)(tokens)

    def _reconstruct(self, latent: Tensor, layer: int, start: int, valid: Tensor | None) -> Tensor:
        # the arithmetic is fp32 even where the model runs under autocast
        with torch.autocast(latent.device.type, enabled=False):
            return self.method.reconstruct(latent, layer, start=start, valid=valid)

    def _matching(self, batch: int, total: int) -> Forward:
        """The forward under way, or the last one for recomputation; a layer called by itself has no padding."""
        now = self.forward
        fits = now is not None and now.total == total and len(now.starts) in (1, batch)
        return now if now is not None and fits else Forward(0, total)
