"""The packed pool: SGLang's MLA pool with 2-bit rows instead of BF16 latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.kernels.exact import Exact
from rolaq.quant.artifact import Artifact
from rolaq.serve import ops
from rolaq.serve.compat import write_location
from rolaq.serve.layers import Layer, make_layers
from rolaq.serve.settings import Settings
from rolaq.serve.sizing import Sizing
from rolaq.serve.windows import Protected, Windows


class Pending(NamedTuple):
    """A layer's new latents `[n, d]` and RoPE keys `[n, d_r]`, held back until its attention has read the past."""

    slots: Tensor
    latents: Tensor
    rope: Tensor


class PackedPool(MLATokenToKVPool):
    """`kv_buffer[l] [slots, bytes]` uint8 are layer l's packed rows, `exact[l] [rows, d]` BF16 its protected latents.

    Slots, pages and their allocation stay SGLang's. Nothing hands out BF16 keys or values: whoever asks for
    them does not know this pool, and is refused.
    """

    def __init__(self, artifact: Artifact, settings: Settings, sizing: Sizing, **arguments: Any) -> None:
        self.artifact, self.settings, self.sizing = artifact, settings, sizing
        self.spec = artifact.config.spec
        super().__init__(**arguments)
        # A pipeline stage holds its own layers alone.
        own = range(self.start_layer, self.start_layer + self.layer_num)
        self.layers = make_layers(artifact.method(), own, self.device)
        self.pending: dict[int, Pending] = {}

    def _create_buffers(self) -> None:
        tokens = self.size + self.page_size  # SGLang writes padding to page 0
        size = self.spec.bytes_per_token(self.kv_lora_rank, self.qk_rope_head_dim)
        s = self.settings
        self.windows = Windows(tokens, s.slots + 1, s.sink, s.recent, s.sink_entries, self.device)
        shape = (self.layer_num, self.windows.rows, self.kv_lora_rank)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.kv_buffer = [
                torch.zeros(tokens, size, dtype=torch.uint8, device=self.device)
                for _ in range(self.layer_num)
            ]
            self.exact = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def _clear_buffers(self) -> None:
        del self.kv_buffer, self.exact

    def get_kv_size_bytes(self) -> int:
        """Bytes of rows, protected latents and tags."""
        return sum(x.nbytes for x in self.kv_buffer) + self.exact.nbytes + self.windows.nbytes

    def rows(self, layer_id: int) -> Tensor:
        """Packed rows `[slots, bytes]` uint8 of a layer."""
        return self.kv_buffer[layer_id - self.start_layer]

    def layer(self, layer_id: int) -> Layer:
        """A layer's write side."""
        return self.layers[layer_id - self.start_layer]

    def exact_of(self, layer_id: int, protected: Protected) -> Exact | None:
        """A layer's protected latents as `kernels.decode` takes them; None for the budget 0+0."""
        w = self.windows
        if w.sink + w.recent == 0:
            return None
        return Exact(self.exact[layer_id - self.start_layer], *protected, w.sink, w.recent)

    def store(self, layer_id: int, slots: Tensor, latents: Tensor, rope: Tensor, exact_row: Tensor) -> None:
        """Quantize and store new latents `[n, d]` and RoPE keys `[n, d_r]` at `slots [n]`."""
        i = layer_id - self.start_layer
        self.layers[i].store(latents, rope, slots, self.kv_buffer[i], self.exact[i], exact_row)

    def rotate(self, layer_id: int, latents: Tensor) -> Tensor:
        """Latents `[n, d]` as the layer's folded projections take them."""
        return self.layer(layer_id).rotate(latents)

    def fetch(self, layer_id: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Latents `[n, d]` as written and RoPE keys `[n, d_r]` of packed rows, BF16."""
        return ops.fetch(self.rows(layer_id), slots, self.kv_lora_rank, self.qk_rope_head_dim, self.spec)

    def set_mla_kv_buffer(
        self, layer: Any, loc: Any, cache_k_nope: Tensor, cache_k_rope: Tensor, **ignored: Any
    ) -> None:
        """Hold a prefill chunk's latents until the backend has attended (`flush`): its window may still hold
        rows of the past that these latents will replace."""
        n = cache_k_nope.shape[0]
        self.pending[layer.layer_id] = Pending(
            write_location(loc), cache_k_nope.reshape(n, -1), cache_k_rope.reshape(n, -1)
        )

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor | None = None, **ignored: Any
    ) -> None:
        """The same from latent and RoPE key in one tensor `[n, 1, d + d_r]`."""
        latents, rope = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        self.set_mla_kv_buffer(layer, loc_info, latents, rope)

    def flush(self, layer_id: int, exact_row: Tensor) -> None:
        """Store what `set_mla_kv_buffer` held back."""
        slots, latents, rope = (x[: len(exact_row)] for x in self.pending.pop(layer_id))
        self.store(layer_id, slots, latents, rope, exact_row)

    def get_mla_kv_buffer(
        self, layer: Any, loc: Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Dequantized latents `[n, 1, d]` in the original basis and RoPE keys `[n, 1, d_r]`."""
        latents, rope = self.fetch(layer.layer_id, loc)
        latents = self.layer(layer.layer_id).restore(latents)
        return latents.to(dst_dtype or self.dtype)[:, None], rope.to(dst_dtype or self.dtype)[:, None]

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """Refused: there are no BF16 keys."""
        raise RolaqError(
            f"layer {layer_id}: the packed pool holds no BF16 keys; this attention path is not supported"
        )

    get_value_buffer = get_key_buffer

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Any, *rest: Any, **more: Any) -> None:
        """Packed rows come back, protected latents do not."""
        super().load_cpu_copy(kv_cache_cpu, indices, *rest, **more)
        self.windows.forget(torch.as_tensor(indices, device=self.windows.row_of.device))

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Move packed rows; protected latents stay behind."""
        super().move_kv_cache(tgt_loc, src_loc)
        self.windows.forget(tgt_loc.view(-1).long())
