"""Attention of new query tokens over a packed INT2 MLA cache: plan, partial results, merge."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rolaq.common.errors import RolaqError, lookup
from rolaq.kernels.decode_portable import decode_item_portable
from rolaq.kernels.exact import Exact
from rolaq.kernels.merge import COLUMNS, merge
from rolaq.kernels.plan import Plan, make_plan
from rolaq.quant.spec import QuantizerSpec

LOG2E = 1.4426950408889634
DEFAULT = QuantizerSpec()


def column_blocks(queries: int, heads: int) -> int:
    """Programs that share one work item: 16 query columns each."""
    return -(-queries * heads // COLUMNS)


def decode(
    q: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    scale: float,
    exact: Exact | None = None,
    plan: Plan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
    spec: QuantizerSpec = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attend from the last `T` tokens of each sequence to all of it.

    q `[B, T, H, d]` and q_rope `[B, T, H, d_r]` BF16, q in the basis the cache was written in; T is 1 to
    8. rows `[slots, bytes]` uint8, `spec.row(d, d_r)` each. page_table `[B, pages]` int32: token i of a
    sequence is row `page_table[b, i // page_size] * page_size + i % page_size`. lengths `[B]` int32
    count the T query tokens; 0 marks padding. `scale` multiplies the logits.

    Returns out `[B, T, H, d]` of q's dtype, in the same basis, and lse `[B, T, H]` fp32 (natural log);
    padding gets zeros and minus infinity. Nothing here reads a length on the host: with `plan`, `out`,
    `lse` and `workspace` given it allocates nothing either.
    """
    batch, queries, heads, d = q.shape
    d_r = q_rope.shape[-1]
    _check(q, q_rope, rows, spec)
    if page_size < 1:
        raise RolaqError(f"page_size must be at least 1, got {page_size}")
    blocks = column_blocks(queries, heads)
    sink, recent = (exact.sink, exact.recent) if exact else (0, 0)
    if plan is None:
        plan = make_plan(lengths, exact.counts if exact else None, sink=sink, recent=recent, blocks=blocks)
    items = plan.items.shape[0]
    part, part_lse = workspace or make_workspace(plan, queries, heads, d)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = q.new_empty(batch, queries, heads, dtype=torch.float32) if lse is None else lse
    arguments = (
        q, q_rope, rows.view(torch.int16), rows.view(torch.float32), exact.latents if exact else q,
        exact.where if exact else lengths, exact.counts if exact else lengths, page_table, lengths,
        plan.items, part, part_lse, q.stride(0), q.stride(2), q_rope.stride(0), q_rope.stride(2),
        page_table.stride(0), scale * LOG2E,
    )  # fmt: skip
    sizes = {
        "QUERIES": queries,
        "HEADS": heads,
        "D": d,
        "DR": d_r,
        "PAGE": page_size,
        "SINK": sink,
        "RECENT": recent,
    }
    lookup("decode kernel", _choose(impl, q, d, d_r), IMPLEMENTATIONS)((items, blocks), arguments, sizes)
    merge(part, part_lse, plan, out, lse)
    return out, lse


def make_workspace(plan: Plan, queries: int, heads: int, d: int) -> tuple[Tensor, Tensor]:
    """Partial results `[items, blocks, 16, d]` and base-2 LSE `[items, blocks, 16]`, fp32."""
    shape = (plan.items.shape[0], column_blocks(queries, heads))
    part = torch.empty(*shape, COLUMNS, d, dtype=torch.float32, device=plan.items.device)
    return part, torch.empty(*shape, COLUMNS, dtype=torch.float32, device=plan.items.device)


def _check(q: Tensor, q_rope: Tensor, rows: Tensor, spec: QuantizerSpec) -> None:
    """Refuse what the kernels were not built for, by name."""
    d, d_r = q.shape[-1], q_rope.shape[-1]
    if d not in (256, 512) or d_r not in (32, 64) or spec.group_size != 128:
        raise RolaqError(
            f"no decode kernel for latent {d}, RoPE {d_r}, group {spec.group_size}; d is 256 or 512, d_r 32 or 64, group 128"
        )
    if (spec.stats_dtype, spec.rope_dtype) != ("float32", "bfloat16"):
        raise RolaqError(
            f"decode reads float32 statistics and bfloat16 RoPE keys, not {spec.stats_dtype} and {spec.rope_dtype}"
        )
    if (
        rows.dtype != torch.uint8
        or rows.shape[-1] != spec.bytes_per_token(d, d_r)
        or not rows.is_contiguous()
    ):
        raise RolaqError(
            f"rows must be contiguous uint8 [slots, {spec.bytes_per_token(d, d_r)}], got {rows.dtype} {tuple(rows.shape)}"
        )
    for name, x in (("q", q), ("q_rope", q_rope)):
        if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.stride(1) != x.shape[2] * x.stride(2):
            raise RolaqError(
                f"{name} must be bfloat16 with heads evenly spaced, got {x.dtype} strides {x.stride()}"
            )


def _choose(impl: str, q: Tensor, d: int, d_r: int) -> str:
    """The Hopper kernel where it runs, else the portable one."""
    if impl != "auto":
        return impl
    return "tensor-core" if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 else "portable"


def _portable(grid: tuple[int, int], arguments: tuple, sizes: dict[str, int]) -> None:
    exact = max(triton.next_power_of_2(sizes["SINK"] + sizes["RECENT"]), 16)
    decode_item_portable[grid](
        *arguments, **sizes, BLOCK=64, EXACT=exact, ASM=arguments[0].is_cuda, num_warps=4, num_stages=2
    )


def _tensor_core(grid: tuple[int, int], arguments: tuple, sizes: dict[str, int]) -> None:
    from rolaq.kernels.decode_gluon import OPTIONS, decode_item

    decode_item[grid](*arguments, **sizes, **OPTIONS)


IMPLEMENTATIONS = {"portable": _portable, "tensor-core": _tensor_core}
