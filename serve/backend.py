"""SGLang attention backend over the packed pool: absorbed decode on packed rows, expanded prefill."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.serve import compat, ops, prefill
from rolaq.serve.batches import Batches, Step
from rolaq.serve.chunks import Chunk, Prefill
from rolaq.serve.fold import attentions, expand
from rolaq.serve.pool import PackedPool

CHUNK_BYTES = 1 << 29  # expanded keys and values of one chunk of a cached prefix


class RolaqBackend(AttentionBackend):
    """Decode reads packed rows through the page table; prefill attends to its own exact latents and to
    the dequantized past, both in expanded form (design: "serving" reading of token protection).

    Raises:
        RolaqError: the pool is not the packed one, or the model's projections are not folded.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, PackedPool):
            raise RolaqError(
                f"the cache is a {type(pool).__name__}, not the packed pool: the plugin's hooks did not apply"
            )
        self.token_to_kv_pool, self.req_to_token_pool = pool, runner.req_to_token_pool
        self.pool = pool
        requests: Tensor = runner.req_to_token_pool.req_to_token
        if len(requests) > pool.windows.requests:
            raise RolaqError(
                f"SGLang holds {len(requests) - 1} requests, the windows {pool.windows.requests - 1}: "
                "set server.slots to at least that"
            )
        self.modules = attentions(runner.model)
        if not all(getattr(m, "rolaq_folded", False) for m in self.modules.values()) or not self.modules:
            raise RolaqError("the model's projections are not folded: the plugin's hooks did not apply")
        self.name, self.attention = prefill.choose(torch.device(runner.device))
        module = next(iter(self.modules.values()))
        self.heads, nope = module.w_kc.shape[:2]
        width = self.heads * (nope + pool.qk_rope_head_dim + module.w_vc.shape[-1]) * 2
        self.batches = Batches(
            pool.windows, requests, page=pool.page_size, heads=self.heads, latent=pool.kv_lora_rank,
            capacity=max(CHUNK_BYTES // width, 4096),
        )  # fmt: skip
        self.step: Step | None = None
        self.chunk: Prefill | None = None
        compat.prepare_backend(self, runner)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a captured step makes its tensors inside the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prefill: everything about the batch. Decode: nothing, its part runs inside the graph."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            self.chunk = self.batches.prefill(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Decode: page table, windows and plan, from the batch's device tensors alone."""
        if forward_batch.forward_mode.is_decode():
            self.step = self.batches.step(
                forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.out_cache_loc
            )

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, **ignored: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of a chunk in expanded form: q, k `[n, H, nope + d_r]`, v `[n, H, v]` → `[n, H v]`.

        Raises:
            RolaqError: the model asks for absorbed prefill, which this backend does not do.
        """
        if q_rope is not None or k_rope is not None or self.chunk is None:
            raise RolaqError(
                "absorbed prefill over the packed cache is not supported: report the model and options"
            )
        now, n, scale = self.chunk, len(self.chunk.exact_row), layer.scaling
        padding = len(q) - n  # of data-parallel attention
        q, k, v = q[:n], k[:n], v[:n]
        out, lse = self.attention(
            q, k, v, now.bounds, now.bounds, now.longest, now.longest, scale=scale, causal=True
        )
        for past in now.chunks:
            keys, values = expand(self.modules[layer.layer_id], *self._past(layer.layer_id, past))
            part = self.attention(
                q, keys, values, now.bounds, past.bounds, now.longest, past.longest, scale=scale, causal=False
            )
            out, lse = prefill.merge(out, lse, *part)
        self.pool.flush(layer.layer_id, now.exact_row)
        out = out.reshape(n, -1)
        return torch.cat((out, out.new_zeros(padding, out.shape[1]))) if padding else out

    def _past(self, layer_id: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """A chunk's latents as decode reads them, protected ones exact, in the written basis with their mean: the
        chunk's own keys have it, and LSEs of both are merged."""
        latents, rope = self.pool.fetch(layer_id, chunk.slots)
        if len(chunk.places):
            exact = self.pool.exact[layer_id - self.pool.start_layer]
            kept = (chunk.rows >= 0)[:, None]
            latents[chunk.places] = torch.where(kept, exact[chunk.rows.clamp(min=0)], latents[chunk.places])
        return self.pool.layer(layer_id).add_mean(latents), rope

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, **ignored: Any,
    ) -> Tensor:  # fmt: skip
        """Store the new token's latent k `[n, 1, d]` and RoPE key, and attend: q `[n, H, d]` in the written
        basis and q_rope `[n, H, d_r]` → `[n, H d]` in the written basis.

        A mean that latents are stored without adds one constant to all logits of a query, which softmax drops, and
        itself to the result.

        Raises:
            RolaqError: latent and RoPE parts come in one tensor, or the cache is not to be written.
        """
        if q_rope is None or k_rope is None or self.step is None or not save_kv_cache:
            raise RolaqError("this model's attention is not supported by the packed cache: report the model")
        now, n = self.step, len(q)
        latents, rope = k.reshape(n, -1), k_rope.reshape(n, -1)
        self.pool.store(layer.layer_id, forward_batch.out_cache_loc, latents, rope, now.exact_row)
        out = ops.attend(
            q.view(n, self.heads, -1).unsqueeze(1), q_rope.view(n, self.heads, -1).unsqueeze(1),
            self.pool.rows(layer.layer_id), now.table, now.lengths, page_size=self.pool.page_size, scale=layer.scaling,
            exact=self.pool.exact_of(layer.layer_id, now.protected), plan=now.plan, workspace=now.workspace,
            spec=self.pool.spec,
        )  # fmt: skip
        return self.pool.layer(layer.layer_id).add_mean(out).view(n, -1)
