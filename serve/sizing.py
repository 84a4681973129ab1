"""How many bytes the packed pool takes, to the last one, and how many tokens fit: no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rolaq.quant.spec import QuantizerSpec

TAG_BYTES = 4  # int32, one for all layers: which exact row a token has, or who owns a row
BF16_BYTES = 2
FP32_BYTES = 4
ROTATION_PARTS = 3  # R or P in three BF16 parts that add up to its fp32 values (kernels.write)


@dataclass(frozen=True)
class Sizing:
    """Bytes of the pool for ``layers`` layers of latents ``d`` and RoPE keys ``d_r`` on one GPU.

    ``slots`` running requests hold ``recent`` BF16 rows each, ``sink_entries`` prefixes ``sink`` rows each.
    ``feedback``: the artifact is written with error feedback, which holds more than a rotation.
    """

    layers: int
    d: int
    d_r: int
    slots: int
    sink: int
    recent: int
    sink_entries: int
    page_size: int = 64
    spec: QuantizerSpec = field(default_factory=QuantizerSpec)
    feedback: bool = False

    @property
    def per_token_layer(self) -> int:
        """Bytes of a token's packed row in one layer: 288 for d = 512, 144 for d = 256."""
        return self.spec.bytes_per_token(self.d, self.d_r)

    @property
    def per_token(self) -> int:
        """Bytes of a token over all layers: its packed rows and its tag."""
        return self.layers * self.per_token_layer + TAG_BYTES

    @property
    def protected_rows(self) -> int:
        """BF16 rows of one layer; the extra slot is where padded requests of a CUDA graph write."""
        return self.sink_entries * self.sink + (self.slots + 1) * self.recent

    @property
    def protected_bytes(self) -> int:
        """Bytes of the BF16 rows and their tags: an owner each and one more, when each place for sinks was last
        used, and the clock (`windows.Windows`)."""
        tags = self.protected_rows + 1 + (max(self.sink_entries, 1) if self.sink else 1) + 1
        return self.protected_rows * self.layers * self.d * BF16_BYTES + tags * TAG_BYTES

    @property
    def write_bytes(self) -> int:
        """Bytes of the layers' write sides on a GPU (`layers`): the rotation; with error feedback also int8 weights
        `[d, d]` and fp32 units and shift `[d]`."""
        square = ROTATION_PARTS * BF16_BYTES + self.feedback
        return self.layers * (square * self.d**2 + 2 * FP32_BYTES * self.d * self.feedback)

    @property
    def fixed(self) -> int:
        """Bytes that do not grow with the tokens: protected rows, write sides, SGLang's padding page."""
        return self.protected_bytes + self.write_bytes + self.page_size * self.per_token

    def tokens(self, available_bytes: int) -> int:
        """Tokens that fit into ``available_bytes``, in whole pages; 0 where not even the fixed part fits."""
        pages = (available_bytes - self.fixed) // (self.per_token * self.page_size)
        return max(pages, 0) * self.page_size

    def bytes(self, tokens: int) -> int:
        """Bytes of a pool that holds ``tokens``."""
        return self.fixed + tokens * self.per_token
