"""BF16 decode kernels to compare with: FlashMLA and SGLang's Triton kernel, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
SPLITS = (4, 8, 16, 32, 64, 128)


def bf16_cache(slots: int, d: int, d_r: int) -> Tensor:
    """A BF16 cache of random rows `[slots, 1, d + d_r]`."""
    cache = torch.empty(slots, 1, d + d_r, dtype=torch.bfloat16, device="cuda")
    for part in cache.split(1 << 16):
        part.normal_()
    return cache


def flashmla(q: Tensor, cache: Tensor, tables: list[Tensor], lengths: Tensor, scale: float) -> list[Call]:
    """One call a page table of 64-token pages; q `[B, T, H, 576]`. ImportError where it is missing."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    _, queries, heads, width = q.shape
    plan, splits = get_mla_metadata(lengths, queries * heads, 1)
    pages = cache.view(-1, 64, 1, width)

    def call(table: Tensor) -> Call:
        return lambda: flash_mla_with_kvcache(
            q, pages, table, lengths, 512, plan, splits, softmax_scale=scale, causal=queries > 1
        )

    return [call(table) for table in tables]


def sglang_triton(
    q: Tensor, cache: Tensor, tables: list[Tensor], lengths: Tensor, scale: float, d: int, splits: int
) -> list[Call]:
    """One call a page table, with `splits` splits a sequence; one query token. ImportError where missing."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    batch, _, heads, _ = q.shape
    device = q.device
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    partial = torch.empty(batch, heads, splits, d, device=device)
    lse = torch.empty(batch, heads, splits, device=device)
    out = torch.empty(batch, heads, d, device=device, dtype=torch.bfloat16)
    counts = torch.full((batch,), splits, dtype=torch.int32, device=device)
    query = q[:, 0].contiguous()
    within = torch.arange(64, device=device)

    def call(table: Tensor) -> Call:
        rows = [(row.long()[:, None] * 64 + within).flatten()[:n] for row, n in zip(table, lengths.tolist())]
        index = torch.cat(rows).int()
        return lambda: decode_attention_fwd(
            query,
            cache,
            cache[..., :d],
            out,
            ends,
            index,
            partial,
            lse,
            counts,
            splits,
            scale,
            1.0,
            1.0,
            has_mla=True,
        )

    return [call(table) for table in tables]
