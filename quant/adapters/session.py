"""What is shared by the hooks and cache layers of one `attach`: the method and the forward under way."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def total(self) -> int:
        """Columns after this forward."""
        return self.past + self.queries

    @cached_property
    def rows(self) -> list[tuple[int, list[int]]]:
        """Rows by their start."""
        return [(s, [row for row, start in enumerate(self.starts) if start == s]) for s in sorted(set(self.starts))]

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
        return torch.cat((self.stored(latent[:, :edge], layer, 0), latent[:, edge:]), dim=1) if edge else latent

    def stored(self, latent: Tensor, layer: int, first: int) -> Tensor:
        """The latents of one write event as they are stored: sinks and left padding exact, the rest quantized.

        Args:
            latent: `[B, n, d]`, the columns `first … first + n - 1`.
            layer: index among the MLA layers.
        """
        now = self._matching(latent, first)
        if len(now.starts) == 1:
            skip = self._skip(now.starts[0], first)
            if skip >= latent.shape[1]:
                return latent
            return torch.cat((latent[:, :skip], self._quantize(latent, now, layer, first, now.starts[0], None)), dim=1)
        stored = latent.clone()
        for start, rows in now.rows:
            skip = self._skip(start, first)
            if skip < latent.shape[1]:
                stored[rows, skip:] = self._quantize(latent, now, layer, first, start, rows)
        return stored

    def _skip(self, start: int, first: int) -> int:
        """Leading columns of an event that stay exact in rows that begin at `start`."""
        return max(start + self.protection.sink - first, 0)

    def _quantize(
        self, latent: Tensor, now: Forward, layer: int, first: int, start: int, rows: Sequence[int] | None
    ) -> Tensor:
        skip = self._skip(start, first)
        valid = None if now.valid is None else now.valid[:, first + skip : first + latent.shape[1]]
        if rows is not None:
            latent, valid = latent[rows], None if valid is None else valid[rows]
        if valid is not None:
            valid = valid.to(latent.device)
        # the arithmetic is fp32 even where the model runs under autocast
        with torch.autocast(latent.device.type, enabled=False):
            return self.method.reconstruct(latent[:, skip:], layer, start=first + skip - start, valid=valid)

    def _matching(self, latent: Tensor, first: int) -> Forward:
        """The forward under way, if these latents can be of it: a layer called by itself has no padding."""
        now = self.forward
        fits = now is not None and first + latent.shape[1] <= now.total and len(now.starts) in (1, latent.shape[0])
        return now if now is not None and fits else Forward(first, latent.shape[1])
