"""Attention of new tokens in expanded (multi-head) form, by the fastest kernel the installation has.

All take q `[n, H, dk]`, k `[m, H, dk]`, v `[m, H, dv]`, the sequences one after the other with `cu_q` and `cu_k`
`[B + 1]` int32 between them, and return out `[n, H, dv]` and the natural-log LSE `[n, H]` fp32. Causal means
that the last query of a sequence sits at its last key. A sequence may have no keys: its LSE is not finite.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

Attention = Callable[..., tuple[Tensor, Tensor]]


def _padded(v: Tensor, width: int) -> Tensor:
    """v with zero columns up to the keys' width, for kernels that want one width."""
    return v if v.shape[-1] == width else functional.pad(v, (0, width - v.shape[-1]))


def flash3(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-3 as SGLang's kernel package ships it (Hopper and Ampere)."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    wide = v if (q.shape[-1], v.shape[-1]) == (192, 128) else _padded(v, q.shape[-1])
    out, lse, *_ = flash_attn_varlen_func(
        q, k, wide, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal, return_softmax_lse=True
    )
    return out[..., : v.shape[-1]], lse.T


def flash2(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2 as PyTorch ships it."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, _padded(v, q.shape[-1]), cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]], lse.T


def plain(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in plain fp32 torch, a sequence at a time: for CPUs and as the tests' reference."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for (begin, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        logits = torch.einsum("nhd,mhd->nhm", q[begin:end].float(), k[first:last].float()) * scale
        if causal:
            ahead = torch.ones(end - begin, last - first, dtype=torch.bool, device=q.device)
            logits.masked_fill_(ahead.triu(1 + last - first - (end - begin))[:, None], float("-inf"))
        lse[begin:end] = logits.logsumexp(-1)
        if last > first:
            out[begin:end] = torch.einsum("nhm,mhd->nhd", logits.softmax(-1), v[first:last].float()).to(q)
    return out, lse


def choose(device: torch.device | str) -> tuple[str, Attention]:
    """Name and function of the attention to use on `device`."""
    if torch.device(device).type != "cuda":
        return "plain", plain
    if torch.cuda.get_device_capability(device)[0] in (8, 9):
        try:
            importlib.import_module("sgl_kernel.flash_attn")
            importlib.import_module("sgl_kernel.flash_ops")
            return "FlashAttention-3", flash3
        except Exception:  # a package built without it fails in several ways
            pass
    return "FlashAttention-2", flash2


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from both parts' out `[n, H, d]` and LSE `[n, H]`."""
    lse_a, lse_b = (torch.where(x.isfinite(), x, float("-inf")) for x in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    weight = torch.where(lse_b.isfinite(), (lse_b - lse).exp(), 0.0)[..., None]
    return torch.lerp(a.float(), torch.where(weight > 0, b.float(), 0.0), weight).to(a.dtype), lse
