"""One list of cases for tests, corner cases and the bench, and the random caches they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolaq.kernels.exact import Exact
from rolaq.kernels.reference import pack_rows
from rolaq.quant.quantizer import encode

POISON = 0xFF  # as bytes of a row: NaN in every dtype


@dataclass(frozen=True)
class Case:
    """A decode call: cached tokens of each sequence, query tokens, heads, and what is protected.

    `magnitude` scales the queries: 1 gives a flat softmax, 8 a peaked one. `rising` makes later tokens
    score far above earlier ones, so that a running or assumed maximum is exceeded again and again.
    """

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 16
    d: int = 512
    d_r: int = 64
    page_size: int = 64
    sink: int = 0
    recent: int = 0
    magnitude: float = 1.0
    rising: float = 0.0

    @property
    def name(self) -> str:
        sizes = (
            f"{len(self.lengths)}x{self.lengths[0]}"
            if len(set(self.lengths)) == 1
            else "-".join(map(str, self.lengths[:4]))
        )
        window = f"_{self.sink}+{self.recent}" if self.sink + self.recent else ""
        extra = f"_m{self.magnitude:g}_r{self.rising:g}" if (self.magnitude, self.rising) != (1, 0) else ""
        return f"{sizes}_T{self.queries}_H{self.heads}_d{self.d}_p{self.page_size}{window}{extra}"


# small enough for the interpreter
SMALL = [
    Case((1,), page_size=1),
    Case((65, 0, 64), heads=8, page_size=16),
    Case((70, 3), heads=20, d=256, d_r=32),
    Case((61, 130), queries=2, heads=5, page_size=53),
    Case((90, 17, 3), sink=4, recent=16),
    Case((33, 2, 100), queries=3, heads=6, d=256, d_r=32, page_size=1, sink=4, recent=8),
    Case((200,), rising=300.0),
]

# for a GPU
CORNER = [
    Case((5000, 17, 0, 1), sink=4, recent=16),
    Case((5000, 17, 0, 1), magnitude=8.0),
    Case((3000, 900), queries=8),
    Case((3000, 9), heads=128, page_size=1),
    Case((2000, 20, 24), heads=8, sink=4, recent=16, queries=4),
    Case((4096,) * 4, queries=4, sink=4, recent=16),
    Case((3000, 131, 700), page_size=256, sink=4, recent=16),
    Case((1500, 61, 53), heads=40, d=256, d_r=32, page_size=61),
    Case((20000,), rising=300.0),
    Case((20000, 300), rising=300.0, heads=40, d=256, d_r=32, sink=4, recent=8),
    Case((1,) * 70, sink=4, recent=16),
    Case((0,)),
]

SPEED = {
    "4x262144": Case((262144,) * 4),
    "4x262144 4+16": Case((262144,) * 4, sink=4, recent=16),
    "64x4096": Case((4096,) * 64),
    "16x16384": Case((16384,) * 16),
    "1x32768": Case((32768,)),
    "4x1024": Case((1024,) * 4),
    "4x1024 4+16": Case((1024,) * 4, sink=4, recent=16),
    "uneven: 262144, 63x512": Case((262144, *[512] * 63)),
    "the same spread evenly": Case((4600,) * 64),
    "d 256: 64x4096": Case((4096,) * 64, heads=40, d=256, d_r=32),
    "d 256: 4x262144": Case((262144,) * 4, heads=40, d=256, d_r=32),
    "128 heads: 64x4096": Case((4096,) * 64, heads=128),
    "4 draft tokens: 16x16384": Case((16384,) * 16, queries=4),
}
WRITE_TOKENS = (4, 64, 1024, 8192)


def build(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The arguments of `decode.decode` for a case. Every row that no token uses is poisoned."""
    cpu = torch.Generator().manual_seed(seed)
    batch, d, d_r = len(case.lengths), case.d, case.d_r
    pages = [-(-n // case.page_size) for n in case.lengths]
    total = sum(pages) + 2
    order = torch.randperm(total - 2, generator=cpu).int() + 2
    table = torch.zeros(batch, max([*pages, 1]), dtype=torch.int32)  # page 0 is poisoned
    for b, page in enumerate(order.split(pages)):
        table[b, : len(page)] = page
    rows = torch.full((total * case.page_size, d // 4 + 2 * d_r + d // 16), POISON, dtype=torch.uint8)
    for b, n in enumerate(case.lengths):
        token = torch.arange(n)
        slots = table[b].long()[token // case.page_size] * case.page_size + token % case.page_size
        z = torch.randn(n, d, generator=cpu) * (0.5 + torch.rand(n, 1, generator=cpu)) + 0.1
        key = torch.randn(n, d_r, generator=cpu)
        key[:, 0] = 1.0 if not case.rising else case.rising * token / max(n, 1)
        rows[slots] = pack_rows(encode(z, 0.93, 1.09), key.bfloat16())
    q = torch.randn(batch, case.queries, case.heads, d + d_r, generator=cpu) * case.magnitude
    q[..., d] = q[..., d] if not case.rising else 10.0
    q = q.bfloat16().to(device)
    return {
        "q": q[..., :d],
        "q_rope": q[..., d:],
        "rows": rows.to(device),
        "page_table": table.to(device),
        "lengths": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "page_size": case.page_size,
        "scale": (d / 4 + d_r) ** -0.5,
        "exact": _exact(case, cpu, device) if case.sink + case.recent else None,
    }


def _exact(case: Case, generator: torch.Generator, device: str) -> Exact:
    """Protected rows in random places; the first sequence uses all of them, the others some."""
    batch, width = len(case.lengths), case.sink + case.recent
    latents = torch.randn(batch * width + 1, case.d, generator=generator).bfloat16()
    latents[-1] = float("nan")
    index = torch.randperm(batch * width, generator=generator).int().view(batch, width)
    counts = torch.stack(
        [torch.randint(0, n + 1, (batch,), generator=generator) for n in (case.sink, case.recent)], 1
    ).int()
    counts[0] = torch.tensor([case.sink, case.recent])
    return Exact(latents.to(device), index.to(device), counts.to(device), case.sink, case.recent)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """An output full of NaN: what a kernel leaves unwritten shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
