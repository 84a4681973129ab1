"""How packed rows are read: kernels on a GPU, their references on a CPU."""

from __future__ import annotations

from torch import Tensor

from rolaq.kernels.decode import decode
from rolaq.kernels.exact import Exact
from rolaq.kernels.gather import gather
from rolaq.kernels.plan import Plan
from rolaq.kernels.reference import decode_reference, gather_reference
from rolaq.quant.spec import QuantizerSpec


def attend(
    q: Tensor, q_rope: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, *, page_size: int,
    scale: float, exact: Exact | None, plan: Plan | None, workspace: tuple[Tensor, Tensor] | None,
    spec: QuantizerSpec,
) -> Tensor:  # fmt: skip
    """Attention of one new token a sequence, `[B, 1, H, d]` BF16, in the written basis (`kernels.decode`)."""
    if q.is_cuda:
        return decode(
            q, q_rope, rows, page_table, lengths, page_size=page_size, scale=scale, exact=exact, plan=plan,
            workspace=workspace, spec=spec,
        )[0]  # fmt: skip
    out, _ = decode_reference(
        q, q_rope, rows, page_table, lengths, page_size=page_size, scale=scale, exact=exact
    )
    return out.to(q.dtype)


def fetch(rows: Tensor, slots: Tensor, d: int, d_r: int, spec: QuantizerSpec) -> tuple[Tensor, Tensor]:
    """Latents `[n, d]` in the written basis and RoPE keys `[n, d_r]` of `rows[slots]`, BF16."""
    if rows.is_cuda:
        return gather(rows, slots, d, d_r, spec=spec)
    latents, rope = gather_reference(rows, slots, d, d_r, spec=spec)
    return latents.bfloat16(), rope
