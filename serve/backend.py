"""SGLang attention backend over the packed pool: absorbed decode on packed rows, expanded prefill."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.kernels.decode import column_blocks, make_workspace
from rolaq.kernels.plan import Plan, make_plan
from rolaq.serve import compat, ops, prefill
from rolaq.serve.chunks import Chunk, Prefill, bounds_of, overlay, positions, split
from rolaq.serve.fold import attentions, expand
from rolaq.serve.pool import PackedPool
from rolaq.serve.step import decode_step
from rolaq.serve.windows import Protected

CHUNK_BYTES = 1 << 29  # expanded keys and values of one chunk of a cached prefix


class Step(NamedTuple):
    """One decode step's inputs to every layer: see `kernels.decode`."""

    table: Tensor
    lengths: Tensor
    exact_row: Tensor
    protected: Protected
    plan: Plan | None
    workspace: tuple[Tensor, Tensor] | None


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
        self.pool, self.windows, self.page = pool, pool.windows, pool.page_size
        self.requests: Tensor = runner.req_to_token_pool.req_to_token
        if len(self.requests) > self.windows.requests:
            raise RolaqError(
                f"SGLang holds {len(self.requests) - 1} requests, the windows {self.windows.requests - 1}: "
                "set server.slots to at least that"
            )
        self.modules = attentions(runner.model)
        if not all(getattr(m, "rolaq_folded", False) for m in self.modules.values()) or not self.modules:
            raise RolaqError("the model's projections are not folded: the plugin's hooks did not apply")
        self.device = torch.device(runner.device)
        self.name, self.attention = prefill.choose(self.device)
        module = next(iter(self.modules.values()))
        self.heads, nope = module.w_kc.shape[:2]
        width = self.heads * (nope + pool.qk_rope_head_dim + module.w_vc.shape[-1]) * 2
        self.capacity = max(CHUNK_BYTES // width, 4096)
        self.ends: OrderedDict[str, int] = OrderedDict()  # where the last chunks of requests ended
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
            self.chunk = self._prefill(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Decode: page table, windows and plan, from the batch's device tensors alone."""
        if forward_batch.forward_mode.is_decode():
            self.step = self._step(
                forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.out_cache_loc
            )

    def _step(self, request: Tensor, length: Tensor, slots: Tensor) -> Step:
        if not length.is_cuda:
            return self._step_reference(request.long(), length.long(), slots.long())
        s = self.windows
        table, lengths, exact_row, protected = decode_step(
            s, self.requests, request, length, slots, self.page
        )
        counts = protected.counts if s.sink + s.recent else None
        plan = make_plan(lengths, counts, sink=s.sink, recent=s.recent, blocks=column_blocks(1, self.heads))
        workspace = make_workspace(plan, 1, self.heads, self.pool.kv_lora_rank)
        return Step(table, lengths, exact_row, protected, plan, workspace)

    def _step_reference(self, request: Tensor, length: Tensor, slots: Tensor) -> Step:
        """`step.decode_step` in plain torch, for CPUs."""
        table = self.requests[:, :: self.page].index_select(0, request) // self.page
        exact_row = self.windows.write_step(request, length - 1, slots, table[:, 0].long() * self.page)
        return Step(table, length.int(), exact_row, self._protected(request, length), None, None)

    def _protected(self, request: Tensor, length: Tensor) -> Protected:
        """Windows of sequences as long as `length [B]`."""
        s = self.windows
        head = torch.arange(s.sink, device=length.device).expand(len(request), -1)
        tail = (length[:, None] - s.recent + torch.arange(s.recent, device=length.device)).clamp(min=0)
        at = torch.cat((head, tail), 1)
        slots = self.requests[request[:, None], at].long()
        return s.protected(request, length, slots[:, : s.sink], slots[:, s.sink :])

    def _prefill(self, batch: Any) -> Prefill:
        prefixes, lengths = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        request = batch.req_pool_indices.long()
        if new := self._new(batch.rids, prefixes, lengths):
            self.windows.begin(request[torch.tensor(new, device=self.device)])
        chunks = []
        if any(prefixes):
            past = self._protected(request, torch.tensor(prefixes, device=self.device))
            chunks = [self._chunk(request, r, prefixes, past) for r in split(prefixes, self.capacity)]
        ranges = [(p, p + n) for p, n in zip(prefixes, lengths, strict=True)]
        sequence, position = positions(ranges, self.device)
        bounds = bounds_of(lengths, self.device)
        starting = bounds[:-1].long()[[b for b, (begin, end) in enumerate(ranges) if begin == 0 < end]]
        exact_row = self.windows.write_chunk(
            request[sequence], position, batch.out_cache_loc[: len(position)].long(),
            self.requests[request, 0].long()[sequence],
            torch.tensor([end for _, end in ranges], device=self.device)[sequence], starting,
        )  # fmt: skip
        return Prefill(bounds, max(lengths, default=0), exact_row, chunks)

    def _new(self, names: list[str] | None, prefixes: list[int], lengths: list[int]) -> list[int]:
        """Places in the batch of requests that do not go on where their last chunk ended."""
        if names is None:  # a dummy batch
            return []
        ends = [self.ends.pop(name, None) for name in names]
        self.ends.update(zip(names, map(sum, zip(prefixes, lengths, strict=True)), strict=True))
        while len(self.ends) > 2 * self.windows.requests:
            self.ends.popitem(last=False)
        return [b for b, (end, prefix) in enumerate(zip(ends, prefixes, strict=True)) if end != prefix]

    def _chunk(
        self, request: Tensor, ranges: list[tuple[int, int]], prefixes: list[int], past: Protected
    ) -> Chunk:
        sequence, position = positions(ranges, self.device)
        places, entries = overlay(ranges, prefixes, self.windows.sink, self.windows.recent)
        entry = torch.tensor(entries, dtype=torch.int64, device=self.device)
        rows = past.where.view(-1)[entry].long()
        # An entry counts where it belongs to the unbroken run from its end of the sequence.
        width = self.windows.sink + self.windows.recent
        b, i = entry // max(width, 1), entry % max(width, 1)
        sinks, recents = past.counts[b].unbind(1)
        counted = torch.where(i < self.windows.sink, i < sinks, i >= width - recents)
        return Chunk(
            self.requests[request[sequence], position].long(),
            bounds_of([e - a for a, e in ranges], self.device),
            max(e - a for a, e in ranges),
            torch.tensor(places, dtype=torch.int64, device=self.device),
            torch.where(counted, rows, -1),
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
        """A chunk's latents as decode reads them, protected ones exact, in the rotated basis."""
        latents, rope = self.pool.fetch(layer_id, chunk.slots)
        if len(chunk.places):
            exact = self.pool.exact[layer_id - self.pool.start_layer]
            kept = (chunk.rows >= 0)[:, None]
            latents[chunk.places] = torch.where(kept, exact[chunk.rows.clamp(min=0)], latents[chunk.places])
        return latents, rope

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, **ignored: Any,
    ) -> Tensor:  # fmt: skip
        """Store the new token's latent k `[n, 1, d]` and RoPE key, and attend: q `[n, H, d]` in the rotated
        basis and q_rope `[n, H, d_r]` → `[n, H d]` in the rotated basis.

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
            self.pool.rows(layer.layer_id), now.table, now.lengths, page_size=self.page, scale=layer.scaling,
            exact=self.pool.exact_of(layer.layer_id, now.protected), plan=now.plan, workspace=now.workspace,
            spec=self.pool.spec,
        )  # fmt: skip
        return out.view(n, -1)
