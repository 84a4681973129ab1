"""Which of a token's two versions, quantized or exact, each query of a chunk reads.

Computing several queries at once with a window per query needs both versions of the tokens that are inside one
query's window and outside another's. The keys are then the cache's view of `[0, split)` followed by the exact
tokens `[first, total)`, and the mask lets every query see exactly one version of every token up to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rolaq.quant.protection import Protection


@dataclass(frozen=True)
class TwoViews:
    """The two views for queries `past … total - 1` under a `per_query` protection."""

    past: int
    total: int
    protection: Protection

    @property
    def split(self) -> int:
        """Tokens in the cache's view: those outside the last query's window."""
        return self.protection.window_start(self.total)

    @property
    def first(self) -> int:
        """The first exact token: the oldest in the first query's window."""
        return self.protection.window_start(self.past + 1)

    @property
    def keys(self) -> int:
        """Keys in both views together."""
        return self.split + self.total - self.first

    def join(self, cached: Tensor, exact: Tensor) -> Tensor:
        """`[B, 1, keys, x]` from the cache's `[B, 1, total, x]` and the exact `[B, 1, total - first, x]`."""
        return torch.cat((cached[:, :, : self.split], exact), dim=2)

    def mask(self, given: Tensor | None, starts: Tensor, like: Tensor, additive: bool) -> Tensor:
        """The mask over both views, `[B or 1, 1, queries, keys]`.

        Args:
            given: the attention's own mask over `total` tokens: bool, additive float, or None for causal.
            starts: each row's first real token, `[B]`, or `[1]` for all rows.
            like: a tensor of the attention's dtype and device.
            additive: whether the mask has to be float where none was given.
        """
        query = torch.arange(self.past, self.total, device=like.device)[:, None]
        token = torch.arange(self.keys, device=like.device)
        in_exact = token >= self.split
        token = torch.where(in_exact, token - self.split + self.first, token)
        seen = (self._reads_exact(query, token, starts[:, None, None]) == in_exact) & (token <= query)
        seen = seen[:, None]
        if given is None:
            return _additive(seen, like.dtype) if additive else seen
        given = torch.cat((given[..., : self.split], given[..., self.first : self.total]), dim=-1)
        if given.dtype == torch.bool:
            return given & seen
        return given.masked_fill(~seen, torch.finfo(given.dtype).min)

    def select(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Token indices `[B, queries, k]` (negative: none) as indices of the version that the query reads."""
        query = torch.arange(self.past, self.total, device=tokens.device)[:, None]
        exact = self._reads_exact(query, tokens, starts[:, None, None]) & (tokens >= 0)
        return torch.where(exact, tokens + (self.split - self.first), tokens)

    def _reads_exact(self, query: Tensor, token: Tensor, start: Tensor) -> Tensor:
        """Whether a query reads a token from the exact view; the cache's view holds its sinks exact already."""
        in_window = token > query - self.protection.recent
        cached_sink = (token - start < self.protection.sink) & (token < self.split)
        return in_window & ~cached_sink


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
