"""MiniCPM3's attention as DeepSeek's: expanded prefill, absorbed decode.

SGLang runs MiniCPM3 absorbed throughout, with latent and RoPE key in one tensor. On the packed pool a chunk must
attend to its own exact latents in expanded form, as every other MLA model's does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolaq.serve.fold import expand


def forward(self: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """Stands in for `MiniCPM3AttentionMLA.forward`: hidden states `[n, hidden]` → `[n, hidden]`."""
    q_nope, q_rope = _queries(self, hidden_states).split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    compressed = self.kv_a_proj_with_mqa(hidden_states)[0]
    latents = self.kv_a_layernorm(compressed[..., : self.kv_lora_rank].contiguous())
    k_rope = compressed[..., self.kv_lora_rank :].contiguous()
    q_rope, k_rope = _rotate(self, positions, q_rope, k_rope)
    extend = forward_batch.forward_mode.is_extend_without_speculative()
    attend = _expanded if extend else _absorbed
    return self.o_proj(attend(self, q_nope, q_rope, latents, k_rope, forward_batch))[0]


def _queries(self: Any, hidden_states: Tensor) -> Tensor:
    if self.q_lora_rank is None:
        q = self.q_proj(hidden_states)[0]
    else:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)[0]))[0]
    return q.view(-1, self.num_local_heads, self.qk_head_dim)


def _rotate(self: Any, positions: Tensor, q_rope: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    shape = q_rope.shape
    q_rope, k_rope = self.rotary_emb(positions, q_rope.reshape(len(k_rope), -1), k_rope)
    return q_rope.view(shape), k_rope.view(-1, 1, self.qk_rope_head_dim)


def _expanded(
    self: Any, q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, forward_batch: Any
) -> Tensor:
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    pool.set_mla_kv_buffer(self.attn, forward_batch.out_cache_loc, latents, k_rope)
    # SGLang drops `kv_b_proj` once it is absorbed; the folded projections expand rotated latents.
    k, v = expand(self, pool.rotate(self.attn.layer_id, latents), k_rope[:, 0])
    return get_attn_backend().forward(torch.cat((q_nope, q_rope), -1), k, v, self.attn, forward_batch)


def _absorbed(
    self: Any, q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, forward_batch: Any
) -> Tensor:
    q = torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
    latents = latents[:, None]
    out = self.attn(q, latents, latents, forward_batch, q_rope=q_rope, k_rope=k_rope)
    out = out.view(-1, self.num_local_heads, self.kv_lora_rank)
    return torch.bmm(out.transpose(0, 1), self.w_vc).transpose(0, 1).flatten(1, 2)
