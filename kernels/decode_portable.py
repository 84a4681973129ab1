"""INT2 MLA decode in plain Triton: any latent of two or four groups, any GPU, and the interpreter.

Arguments and results are `decode_gluon.decode_item`'s. Tokens are the columns of a matrix instruction
here and query columns its rows; a running maximum rescales the sums tile by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _plane(words, j: tl.constexpr, ASM: tl.constexpr):
    """Plane j of 16-bit words as BF16, `code * 4^(j mod 4) * 2^-133`."""
    if not ASM:
        # The interpreter has neither inline assembly nor BF16 subnormals: the same numbers in fp32.
        code = (words.to(tl.int32) >> (2 * j)) & 3
        return code.to(tl.float32) * (4.0 ** (j % 4)) * 2.0**-133
    else:
        # Hidden from the compiler, which otherwise unpacks before the operand's layout and spills.
        if j >= 4:
            words = tl.inline_asm_elementwise(
                "shr.u32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        if j % 4 == 0:
            kept = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00030003;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        elif j % 4 == 1:
            kept = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x000c000c;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        elif j % 4 == 2:
            kept = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00300030;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            kept = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x00c000c0;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        return kept.to(tl.bfloat16, bitcast=True)


@triton.jit
def _query(q_at, ok, j: tl.constexpr, W: tl.constexpr, TYPE: tl.constexpr):
    """Plane j of the queries times 2^(100 - 2 (j mod 4)), BF16, and its sum, fp32."""
    q = tl.load(q_at + j * W, mask=ok, other=0.0).to(tl.float32)
    return (q * 2.0 ** (100 - 2 * (j % 4))).to(TYPE), tl.sum(q, 1)


@triton.jit
def decode_item_portable(
    q_ptr, q_rope_ptr, rows16, rows32, exact_ptr, exact_index, window_ptr, table_ptr, lengths_ptr, items_ptr,
    part_ptr, lse_ptr, q_row, q_col, r_row, r_col, table_row, scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr,
    SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Partial attention of one work item and 16 query columns; see `decode_gluon.decode_item`."""
    N: tl.constexpr = 16
    TYPE: tl.constexpr = tl.bfloat16 if ASM else tl.float32
    W: tl.constexpr = D // 8
    G: tl.constexpr = D // 128
    COLS: tl.constexpr = QUERIES * HEADS
    ROW16: tl.constexpr = (D // 4 + 2 * DR + 8 * G) // 2
    item = tl.program_id(0)
    block = tl.program_id(1)
    kind = tl.load(items_ptr + item * 4 + 3)
    if kind == 0:
        return
    seq = tl.load(items_ptr + item * 4)
    begin = tl.load(items_ptr + item * 4 + 1)
    end = tl.load(items_ptr + item * 4 + 2)
    length = tl.load(lengths_ptr + seq)
    table = table_ptr + seq.to(tl.int64) * table_row
    col = block * N + tl.arange(0, N)
    visible = length - QUERIES + 1 + col // HEADS
    word = tl.arange(0, W)
    dim = tl.arange(0, DR)
    q_at = q_ptr + seq.to(tl.int64) * q_row + (col * q_col)[:, None] + word[None, :]
    inside = (col < COLS)[:, None]
    q0, t0 = _query(q_at, inside, 0, W, TYPE)
    q1, t1 = _query(q_at, inside, 1, W, TYPE)
    q2, t2 = _query(q_at, inside, 2, W, TYPE)
    q3, t3 = _query(q_at, inside, 3, W, TYPE)
    q4, t4 = _query(q_at, inside, 4, W, TYPE)
    q5, t5 = _query(q_at, inside, 5, W, TYPE)
    q6, t6 = _query(q_at, inside, 6, W, TYPE)
    q7, t7 = _query(q_at, inside, 7, W, TYPE)
    r_at = q_rope_ptr + seq.to(tl.int64) * r_row + (col * r_col)[:, None] + dim[None, :]
    qr = (tl.load(r_at, mask=inside, other=0.0).to(tl.float32) * 2.0**-33).to(TYPE)
    o0 = tl.zeros([N, W], tl.float32)
    o1 = tl.zeros([N, W], tl.float32)
    o2 = tl.zeros([N, W], tl.float32)
    o3 = tl.zeros([N, W], tl.float32)
    o4 = tl.zeros([N, W], tl.float32)
    o5 = tl.zeros([N, W], tl.float32)
    o6 = tl.zeros([N, W], tl.float32)
    o7 = tl.zeros([N, W], tl.float32)
    m = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    f0 = tl.zeros([N], tl.float32)
    f1 = tl.zeros([N], tl.float32)
    f2 = tl.zeros([N], tl.float32)
    f3 = tl.zeros([N], tl.float32)
    logit = scale * 2.0**33
    lift = 2.0**64
    fall = 2.0**69
    step = 0.25
    if kind == 2:
        lift = 1.0
        fall = 1.0
        step = 1.0
        sinks = tl.minimum(tl.load(window_ptr + seq * 2), tl.minimum(length, SINK))
        recents = tl.minimum(tl.minimum(tl.load(window_ptr + seq * 2 + 1), RECENT), length - sinks)
        i = tl.arange(0, EXACT)
        token = tl.where(i < SINK, i, length - RECENT - SINK + i)
        ok = tl.where(i < SINK, i < sinks, (i >= SINK + RECENT - recents) & (i < SINK + RECENT))
        index = tl.load(exact_index + seq * (SINK + RECENT) + i, mask=ok, other=0)
        page = tl.load(table + token // PAGE, mask=ok, other=0)
        slot = (page * PAGE + token % PAGE).to(tl.int64)
        key = tl.load(rows16 + (slot * ROW16)[None, :] + W + dim[:, None], mask=ok[None, :], other=0)
        s = tl.dot(qr, key.to(tl.bfloat16, bitcast=True).to(TYPE))
        latent = exact_ptr + (index.to(tl.int64) * D)[:, None] + word[None, :]
        c0 = tl.load(latent, mask=ok[:, None], other=0.0).to(TYPE)
        c1 = tl.load(latent + W, mask=ok[:, None], other=0.0).to(TYPE)
        c2 = tl.load(latent + 2 * W, mask=ok[:, None], other=0.0).to(TYPE)
        c3 = tl.load(latent + 3 * W, mask=ok[:, None], other=0.0).to(TYPE)
        c4 = tl.load(latent + 4 * W, mask=ok[:, None], other=0.0).to(TYPE)
        c5 = tl.load(latent + 5 * W, mask=ok[:, None], other=0.0).to(TYPE)
        c6 = tl.load(latent + 6 * W, mask=ok[:, None], other=0.0).to(TYPE)
        c7 = tl.load(latent + 7 * W, mask=ok[:, None], other=0.0).to(TYPE)
        s += (tl.dot(q0, tl.trans(c0)) + tl.dot(q4, tl.trans(c4))) * 2.0**-100 * 2.0**-33
        s += (tl.dot(q1, tl.trans(c1)) + tl.dot(q5, tl.trans(c5))) * 2.0**-98 * 2.0**-33
        s += (tl.dot(q2, tl.trans(c2)) + tl.dot(q6, tl.trans(c6))) * 2.0**-96 * 2.0**-33
        s += (tl.dot(q3, tl.trans(c3)) + tl.dot(q7, tl.trans(c7))) * 2.0**-94 * 2.0**-33
        s = tl.where(ok[None, :] & (token[None, :] < visible[:, None]), s * logit, float("-inf"))
        m = tl.max(s, 1)
        m = tl.where(m == float("-inf"), 0.0, m) - 64.0
        p = tl.exp2(s - m[:, None])
        total = tl.sum(p, 1)
        p = p.to(TYPE)
        o0 = tl.dot(p, c0)
        o1 = tl.dot(p, c1)
        o2 = tl.dot(p, c2)
        o3 = tl.dot(p, c3)
        o4 = tl.dot(p, c4)
        o5 = tl.dot(p, c5)
        o6 = tl.dot(p, c6)
        o7 = tl.dot(p, c7)
    else:
        for start in range(begin, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            ok = token < end
            page = tl.load(table + token // PAGE, mask=ok, other=0)
            slot = (page * PAGE + token % PAGE).to(tl.int64)
            words = tl.load(rows16 + (slot * ROW16)[:, None] + word[None, :], mask=ok[:, None], other=0)
            key = tl.load(rows16 + (slot * ROW16)[:, None] + W + dim[None, :], mask=ok[:, None], other=0)
            at = rows32 + slot * (ROW16 // 2) + (W + DR) // 2
            a0 = tl.load(at, mask=ok, other=1.0)
            b0 = tl.load(at + 1, mask=ok, other=0.0)
            a1 = tl.load(at + 2, mask=ok, other=1.0)
            b1 = tl.load(at + 3, mask=ok, other=0.0)
            u = tl.dot(qr, tl.trans(key.to(tl.bfloat16, bitcast=True).to(TYPE)))
            if G == 4:
                a2 = tl.load(at + 4, mask=ok, other=1.0)
                b2 = tl.load(at + 5, mask=ok, other=0.0)
                a3 = tl.load(at + 6, mask=ok, other=1.0)
                b3 = tl.load(at + 7, mask=ok, other=0.0)
            else:
                a3 = a1
                a2 = a1
                a1 = a0
            s = tl.dot(q0, tl.trans(_plane(words, 0, ASM)))
            s = tl.dot(q1, tl.trans(_plane(words, 1, ASM)), s)
            u += s * a0[None, :]
            s = tl.dot(q2, tl.trans(_plane(words, 2, ASM)))
            s = tl.dot(q3, tl.trans(_plane(words, 3, ASM)), s)
            u += s * a1[None, :]
            s = tl.dot(q4, tl.trans(_plane(words, 4, ASM)))
            s = tl.dot(q5, tl.trans(_plane(words, 5, ASM)), s)
            u += s * a2[None, :]
            s = tl.dot(q6, tl.trans(_plane(words, 6, ASM)))
            s = tl.dot(q7, tl.trans(_plane(words, 7, ASM)), s)
            u = (u + s * a3[None, :]) * logit
            if G == 4:
                u += ((t0 + t1) * scale)[:, None] * b0[None, :] + ((t2 + t3) * scale)[:, None] * b1[None, :]
                u += ((t4 + t5) * scale)[:, None] * b2[None, :] + ((t6 + t7) * scale)[:, None] * b3[None, :]
            else:
                u += ((t0 + t1 + t2 + t3) * scale)[:, None] * b0[None, :]
                u += ((t4 + t5 + t6 + t7) * scale)[:, None] * b1[None, :]
            if QUERIES == 1:
                u = tl.where(ok[None, :], u, float("-inf"))
            else:
                u = tl.where(token[None, :] < tl.minimum(visible, end)[:, None], u, float("-inf"))
            new = tl.maximum(m, tl.max(u, 1) - 64.0)
            base = tl.where(new == float("-inf"), 0.0, new)
            keep = tl.exp2(m - base)
            m = new
            p = tl.exp2(u - base[:, None])
            total = total * keep + tl.sum(p, 1)
            p0 = (p * a0[None, :]).to(TYPE)
            p1 = (p * a1[None, :]).to(TYPE)
            p2 = (p * a2[None, :]).to(TYPE)
            p3 = (p * a3[None, :]).to(TYPE)
            # Through the rounded weights: see README.md, "Rounding".
            f0 = f0 * keep + tl.sum(p0.to(tl.float32) * (b0 / a0)[None, :], 1)
            if G == 4:
                f1 = f1 * keep + tl.sum(p1.to(tl.float32) * (b1 / a1)[None, :], 1)
                f2 = f2 * keep + tl.sum(p2.to(tl.float32) * (b2 / a2)[None, :], 1)
                f3 = f3 * keep + tl.sum(p3.to(tl.float32) * (b3 / a3)[None, :], 1)
            else:
                f1 = f1 * keep + tl.sum(p2.to(tl.float32) * (b1 / a2)[None, :], 1)
            o0 = tl.dot(p0, _plane(words, 0, ASM), o0 * keep[:, None])
            o1 = tl.dot(p0, _plane(words, 1, ASM), o1 * keep[:, None])
            o2 = tl.dot(p1, _plane(words, 2, ASM), o2 * keep[:, None])
            o3 = tl.dot(p1, _plane(words, 3, ASM), o3 * keep[:, None])
            o4 = tl.dot(p2, _plane(words, 4, ASM), o4 * keep[:, None])
            o5 = tl.dot(p2, _plane(words, 5, ASM), o5 * keep[:, None])
            o6 = tl.dot(p3, _plane(words, 6, ASM), o6 * keep[:, None])
            o7 = tl.dot(p3, _plane(words, 7, ASM), o7 * keep[:, None])
        if G == 2:
            f3 = f1
            f2 = f1
            f1 = f0
    place = item * tl.num_programs(1) + block
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
    tl.store(lse_ptr + place * N + tl.arange(0, N), tl.where(total > 0.0, m + tl.log2(total), float("-inf")))
    f0 = (f0 * inverse)[:, None]
    f1 = (f1 * inverse)[:, None]
    f2 = (f2 * inverse)[:, None]
    f3 = (f3 * inverse)[:, None]
    inverse = (inverse * fall)[:, None]
    out = part_ptr + place.to(tl.int64) * (D * N) + word[None, :] + (tl.arange(0, N) * D)[:, None]
    tl.store(out, o0 * lift * inverse + f0)
    tl.store(out + 4 * W, o4 * lift * inverse + f2)
    lift *= step
    tl.store(out + 1 * W, o1 * lift * inverse + f0)
    tl.store(out + 5 * W, o5 * lift * inverse + f2)
    lift *= step
    tl.store(out + 2 * W, o2 * lift * inverse + f1)
    tl.store(out + 6 * W, o6 * lift * inverse + f3)
    lift *= step
    tl.store(out + 3 * W, o3 * lift * inverse + f1)
    tl.store(out + 7 * W, o7 * lift * inverse + f3)
