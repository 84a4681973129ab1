"""Plain torch beside each kernel, same argument names: what the kernels must compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolaq.kernels.exact import Exact
from rolaq.quant.feedback import Feedback, encode_with_feedback
from rolaq.quant.packing import pack_codes, unpack_codes
from rolaq.quant.quantizer import Codes, encode
from rolaq.quant.quantizer import decode as dequantize
from rolaq.quant.spec import QuantizerSpec

if TYPE_CHECKING:
    from rolaq.kernels.write_feedback import FeedbackWriter

DEFAULT = QuantizerSpec()


def unpack_rows(rows: Tensor, d: int, d_r: int, spec: QuantizerSpec = DEFAULT) -> tuple[Tensor, Tensor]:
    """Packed rows `[n, bytes]` uint8 → (latents `[n, d]` fp32 in the rotated basis, RoPE keys `[n, d_r]`)."""
    codes, rope, params = (
        rows[:, part.offset : part.offset + part.size].contiguous() for part in spec.row(d, d_r)[:3]
    )
    scale, offset = params.view(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    return dequantize(Codes(unpack_codes(codes), scale, offset)), rope.view(torch.bfloat16)


def pack_rows(codes: Codes, rope: Tensor, spec: QuantizerSpec = DEFAULT) -> Tensor:
    """Codes `[n, d]` with statistics and RoPE keys `[n, d_r]` BF16 → packed rows `[n, bytes]` uint8."""
    params = torch.stack((codes.scale, codes.offset), -1).flatten(-2).contiguous()
    parts = (pack_codes(codes.codes), rope.contiguous().view(torch.uint8), params.view(torch.uint8))
    return torch.cat(parts, -1)


def token_slots(page_table: Tensor, tokens: Tensor, page_size: int) -> Tensor:
    """Row numbers of one sequence's `tokens` through its `page_table [pages]`."""
    return page_table.long()[tokens // page_size] * page_size + tokens % page_size


def sequence_latents(
    rows: Tensor,
    page_table: Tensor,
    length: int,
    d: int,
    d_r: int,
    page_size: int,
    exact: Exact | None,
    b: int,
) -> tuple[Tensor, Tensor]:
    """Sequence b as decode sees it: latents `[length, d]`, RoPE keys `[length, d_r]`, fp32."""
    tokens = torch.arange(length, device=rows.device)
    latents, rope = unpack_rows(rows[token_slots(page_table[b], tokens, page_size)], d, d_r)
    if exact is not None:
        sinks, recents = exact.counts[b].tolist()
        sinks = min(sinks, exact.sink, length)
        recents = min(recents, exact.recent, length - sinks)
        where = exact.where[b].long()
        latents[:sinks] = exact.latents[where[:sinks]].float()
        if recents:
            latents[-recents:] = exact.latents[where[-recents:]].float()
    return latents, rope.float()


def decode_reference(
    q: Tensor, q_rope: Tensor, rows: Tensor, page_table: Tensor, lengths: Tensor, *, page_size: int,
    scale: float, exact: Exact | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`decode.decode` in fp32: returns out `[B, T, H, d]` fp32 and lse `[B, T, H]`."""
    queries, d, d_r = q.shape[1], q.shape[-1], q_rope.shape[-1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        latents, rope = sequence_latents(rows, page_table, length, d, d_r, page_size, exact, b)
        logits = (q[b].float() @ latents.T + q_rope[b].float() @ rope.T) * scale  # [T, H, length]
        last = length - queries + torch.arange(queries, device=q.device)
        hidden = torch.arange(length, device=q.device) > last[:, None, None]
        logits = logits.masked_fill(hidden, float("-inf"))
        lse[b] = logits.logsumexp(-1)
        out[b] = torch.nan_to_num(logits.softmax(-1), nan=0.0) @ latents
    return out, lse


def write_reference(
    latents: Tensor, rope: Tensor, rotation: Tensor | None, *, threshold: float, gain: float,
    spec: QuantizerSpec = DEFAULT,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `write.write` stores: packed rows `[n, bytes]` and rotated latents `[n, d]` BF16.

    The rotation `[d, d]` is fp32 here and its product is taken in fp64.
    """
    z = latents.float() if rotation is None else (latents.double() @ rotation.double()).float()
    return pack_rows(encode(z, threshold, gain, spec), rope, spec), z.bfloat16()


def write_feedback_reference(
    latents: Tensor, rope: Tensor, writer: FeedbackWriter, *, rotated: bool = False
) -> tuple[Tensor, Tensor]:
    """What `write_feedback.write_with_feedback` stores: packed rows `[n, bytes]` and `c P - shift [n, d]` BF16.

    P is the sum of its parts, and its product is taken in fp64.
    """
    z = latents
    if not rotated:
        z = (latents.double() @ writer.rotation.double().sum(0)).float() - writer.shift
    threshold, gain = (torch.tensor(value, device=z.device) for value in (writer.threshold, writer.gain))
    feedback = Feedback(writer.weight.mT, writer.unit)
    codes = encode_with_feedback(z, threshold, gain, feedback, writer.spec)
    return pack_rows(codes, rope, writer.spec), z.bfloat16()


def gather_reference(
    rows: Tensor,
    slots: Tensor,
    d: int,
    d_r: int,
    *,
    rotation: Tensor | None = None,
    spec: QuantizerSpec = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """`gather.gather` in fp32."""
    latents, rope = unpack_rows(rows[slots.long()], d, d_r, spec)
    return latents if rotation is None else latents @ rotation.float().T, rope
