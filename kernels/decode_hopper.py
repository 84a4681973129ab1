"""INT2 MLA decode for d = 512: one work item of the plan per program (Gluon, `mma.sync`).

Query columns (query token, head) are the 16 rows of a matrix instruction, tokens or latent words its
columns. Codes become BF16 operands in registers by one AND; queries stay in shared memory, which leaves
registers for three programs a multiprocessor. `kernels/README.md` derives the powers of two. Same
arguments and results as `decode_portable`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.jit
def _mask(words, BITS: gl.constexpr):
    """Keep one plane of two 16-bit words a register; read as BF16 the result is `code * 4^j * 2^-133`."""
    kept = gl.inline_asm_elementwise(
        "and.b32 $0, $1, " + BITS + ";", "=r,r", [words], dtype=gl.int16, is_pure=True, pack=2
    )
    return kept.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _plane(words, j: gl.constexpr):
    """Plane j of the low byte (j = 0..3) of each 16-bit word, as BF16."""
    if j == 0:
        return _mask(words, "0x00030003")
    elif j == 1:
        return _mask(words, "0x000c000c")
    elif j == 2:
        return _mask(words, "0x00300030")
    else:
        return _mask(words, "0x00c000c0")


@gluon.jit
def _high(words):
    """Bring the high bytes down; what the shift drags in above bit 7 is masked later."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 8;", "=r,r", [words], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _round(x):
    """fp32 → BF16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _widen(x):
    """BF16 → fp32, two at a time."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _own_tokens(x):
    """A thread's four tokens of each row, `[16, 64]` → `[16, 4, 4]` each, moving nothing."""
    first, second = x.reshape([16, 2, 4, 4, 2]).permute([0, 2, 3, 1, 4]).split()
    a, b = first.split()
    c, d = second.split()
    return a, b, c, d


@gluon.jit
def _own(x, LAYOUT: gl.constexpr):
    """A value by token, `[64]` → the thread's four tokens, `[1, 4, 4]` each."""
    first, second = x.reshape([2, 4, 4, 2]).permute([1, 2, 0, 3]).split()
    a, b = first.split()
    c, d = second.split()
    a = gl.convert_layout(a, LAYOUT, assert_trivial=True)[None, :, :]
    b = gl.convert_layout(b, LAYOUT, assert_trivial=True)[None, :, :]
    c = gl.convert_layout(c, LAYOUT, assert_trivial=True)[None, :, :]
    d = gl.convert_layout(d, LAYOUT, assert_trivial=True)[None, :, :]
    return a, b, c, d


@gluon.jit
def _add_tokens(total, x):
    a, b, c, d = _own_tokens(x)
    return total + ((a + b) + (c + d))


@gluon.jit
def _add_products(total, x, y, LAYOUT: gl.constexpr):
    a, b, c, d = _own_tokens(x)
    p, q, r, s = _own(y, LAYOUT)
    return total + a * p + b * q + c * r + d * s


@gluon.jit
def _highest(top, x):
    a, b, c, d = _own_tokens(x)
    return gl.maximum(top, gl.maximum(gl.maximum(a, b), gl.maximum(c, d)))


@gluon.jit
def _group(par_s, g: gl.constexpr, PAIR: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale and offset of group g by token."""
    a, b = par_s.slice(2 * g, 2, dim=1).load(PAIR).split()
    return gl.convert_layout(a, LAYOUT, assert_trivial=True), gl.convert_layout(b, LAYOUT, assert_trivial=True)


@gluon.jit
def _weigh(p, par_s, p_s, f, g: gl.constexpr, TILE: gl.constexpr, PAIR: gl.constexpr, LAYOUT: gl.constexpr,
           OWN: gl.constexpr):  # fmt: skip
    """Store the group's weights `p a` rounded to BF16; add `p b` to f, through the rounded weights.

    A rounding error then meets the whole value, not its code alone, which is twice as large.
    """
    a, b = _group(par_s, g, PAIR, LAYOUT)
    w = _round(p * a[None, :])
    p_s.store(w)
    w = _widen(w)
    r = b * _reciprocal(a)
    if TILE == 128:
        w, v = w.reshape([16, 2, 64]).permute([0, 2, 1]).split()
        r, q = r.reshape([2, 64]).permute([1, 0]).split()
        f = _add_products(f, v, q, OWN)
    return _add_products(f, w, r, OWN)


@gluon.jit
def _slots(table, start, end, TILE: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers of tokens `start …` through the page table; beyond `end` the last token's again."""
    token = gl.minimum(start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return gl.load(table + token // PAGE) * PAGE + token % PAGE


@gluon.jit
def _copy_tile(
    rows16, rows32, slot, slot_p, code_s, rope_s, par_s,
    W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr, ROW16: gl.constexpr, CL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile's codes, RoPE keys and parameters."""
    row = rows16 + (slot.to(gl.int64) * ROW16)[:, None]
    word = gl.arange(0, W, layout=gl.SliceLayout(0, CL))
    async_copy.async_copy_global_to_shared(code_s, row + word[None, :])
    word = gl.arange(0, DR, layout=gl.SliceLayout(0, CL))
    async_copy.async_copy_global_to_shared(rope_s, row + W + word[None, :])
    row = rows32 + (slot_p.to(gl.int64) * (ROW16 // 2))[:, None] + (W + DR) // 2
    word = gl.arange(0, 2 * G, layout=gl.SliceLayout(0, PL))
    async_copy.async_copy_global_to_shared(par_s, row + word[None, :])
    async_copy.commit_group()


@gluon.jit
def _window(i, sinks, recents, length, SINK: gl.constexpr, RECENT: gl.constexpr):
    """Token of protected entry i, and whether the entry is in use."""
    token = gl.where(i < SINK, i, length - RECENT - SINK + i)
    ok = gl.where(i < SINK, i < sinks, (i >= SINK + RECENT - recents) & (i < SINK + RECENT))
    return token, ok


@gluon.jit
def decode_item(
    q_ptr, q_rope_ptr, rows16, rows32, exact_ptr, exact_index, window_ptr, table_ptr, lengths_ptr, items_ptr,
    part_ptr, lse_ptr, q_row, q_col, r_row, r_col, table_row, scale,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr,
    SINK: gl.constexpr, RECENT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Partial attention of one work item and 16 query columns: `part [item, block, 16, D]`, base-2 LSE.

    `items [n, 4]` int32: sequence, first token, last token + 1, kind (0 nothing, 1 packed, 2 protected).
    `scale` is the softmax scale times log2(e).
    """
    N: gl.constexpr = 16
    STAGES: gl.constexpr = 2
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    COLS: gl.constexpr = QUERIES * HEADS
    ROW16: gl.constexpr = (D // 4 + 2 * DR + 8 * G) // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_col: gl.constexpr = gl.SliceLayout(0, mma)
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PL: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Both parameters of a group for each of a thread's tokens.
    PAIR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [32, 0]] if TILE == 64 else [[0, 1], [1, 0], [32, 0], [64, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[8, 0], [16, 0]],
        [],
        [TILE, 2],
    )

    item = gl.program_id(0)
    block = gl.program_id(1)
    kind = gl.load(items_ptr + item * 4 + 3)
    if kind == 0:
        return
    seq = gl.load(items_ptr + item * 4)
    begin = gl.load(items_ptr + item * 4 + 1)
    end = gl.load(items_ptr + item * 4 + 2)
    length = gl.load(lengths_ptr + seq)
    table = table_ptr + seq.to(gl.int64) * table_row

    q_s = gl.allocate_shared_memory(gl.bfloat16, [8, N, W], SW)
    qr_s = gl.allocate_shared_memory(gl.bfloat16, [N, DR], SW)
    sum_s = gl.allocate_shared_memory(gl.float32, [G, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p0_s = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SW)
    p1_s = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SW)
    p2_s = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SW)
    p3_s = gl.allocate_shared_memory(gl.bfloat16, [N, TILE], SW)
    code_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, W], SW)
    rope_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, DR], SW)
    par_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE, 2 * G], PLAIN)

    slot = _slots(table, begin, end, TILE, PAGE, CL)
    slot_p = _slots(table, begin, end, TILE, PAGE, PL)
    if kind == 1:
        _copy_tile(rows16, rows32, slot, slot_p, code_s.index(0), rope_s.index(0), par_s.index(0),
                           W, DR, G, ROW16, CL, PL)  # fmt: skip

    # Queries: plane j times 2^(100 - 2 (j mod 4)), RoPE part times 2^-33, and the sums by group.
    col = block * N + gl.arange(0, N, layout=gl.SliceLayout(1, CL))
    inside = (col < COLS)[:, None]
    at = gl.arange(0, W, layout=gl.SliceLayout(0, CL))
    q_at = q_ptr + seq.to(gl.int64) * q_row + (col * q_col)[:, None] + at[None, :]
    for g in gl.static_range(G):
        both = gl.zeros([N, W], gl.float32, CL)
        for half in gl.static_range(8 // G):
            q = gl.load(q_at + (g * (8 // G) + half) * W, mask=inside, other=0.0).to(gl.float32)
            both += q
            q_s.index(g * (8 // G) + half).store(
                (q * 2.0 ** (100 - 2 * ((g * (8 // G) + half) % 4))).to(gl.bfloat16)
            )
        sum_s.index(g).store(gl.sum(both, 1) * scale)
    at = gl.arange(0, DR, layout=gl.SliceLayout(0, CL))
    r_at = q_rope_ptr + seq.to(gl.int64) * r_row + (col * r_col)[:, None] + at[None, :]
    q = gl.load(r_at, mask=inside, other=0.0).to(gl.float32)
    qr_s.store((q * 2.0**-33).to(gl.bfloat16))
    gl.thread_barrier()
    c0 = sum_s.index(0).load(by_row)
    c1 = sum_s.index(1).load(by_row)
    c2 = sum_s.index(2).load(by_row)
    c3 = sum_s.index(3).load(by_row)

    column = block * N + gl.arange(0, N, layout=by_row)
    visible = length - QUERIES + 1 + column // HEADS  # tokens that a column's query token sees
    zero = gl.zeros([N, 64], gl.float32, mma)
    blank = gl.zeros([N, TILE], gl.float32, mma)
    if TILE == 128:
        none, none_2 = blank.reshape([N, 2, 64]).permute([0, 2, 1]).split()
    else:
        none = zero
    none, none_2, none_3, none_4 = _own_tokens(none)
    OWN: gl.constexpr = gl.SliceLayout(0, none.type.layout)
    m = gl.zeros([N], gl.float32, by_row)
    o0 = zero
    o1 = zero
    o2 = zero
    o3 = zero
    o4 = zero
    o5 = zero
    o6 = zero
    o7 = zero
    total = none
    f0 = none
    f1 = none
    f2 = none
    f3 = none
    lift = 2.0**64
    fall = 2.0**69
    step = 0.25
    logit = scale * 2.0**33
    if kind == 2:
        # Protected rows: BF16 latents by register loads; few enough that latency is all that counts.
        lift = 1.0
        fall = 1.0
        step = 1.0
        sinks = gl.minimum(gl.minimum(gl.load(window_ptr + seq * 2), SINK), length)
        recents = gl.minimum(gl.minimum(gl.load(window_ptr + seq * 2 + 1), RECENT), length - sinks)
        i = gl.arange(0, TILE, layout=gl.SliceLayout(0, right))
        word = gl.arange(0, W, layout=gl.SliceLayout(1, right))
        token, ok = _window(i, sinks, recents, length, SINK, RECENT)
        index = gl.load(exact_index + seq * (SINK + RECENT) + i, mask=ok, other=0)
        page = gl.load(table + token // PAGE, mask=ok, other=0)
        rope = rows16 + ((page * PAGE + token % PAGE).to(gl.int64) * ROW16)[None, :] + W + word[:, None]
        key = gl.load(rope, mask=ok[None, :] & (word < DR)[:, None], other=0).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.load(left), key, blank)
        latent = exact_ptr + (index.to(gl.int64) * D)[None, :] + word[:, None]
        for j in gl.static_range(8):
            key = gl.load(latent + j * W, mask=ok[None, :], other=0.0)
            u += (mma_v2(q_s.index(j).load(left), key, blank) * 2.0**-100) * 2.0 ** (2 * (j % 4) - 33)
        i = gl.arange(0, TILE, layout=by_col)
        token, ok = _window(i, sinks, recents, length, SINK, RECENT)
        t = gl.where(ok[None, :] & (token[None, :] < visible[:, None]), u * logit, float("-inf"))
        m = gl.max(t, 1)
        m = gl.where(m == float("-inf"), 0.0, m) - 64.0
        p = gl.exp2(t - m[:, None])
        if TILE == 128:
            p_low, p_high = p.reshape([N, 2, 64]).permute([0, 2, 1]).split()
            total = _add_tokens(_add_tokens(total, p_low), p_high)
        else:
            total = _add_tokens(total, p)
        p0_s.store(p.to(gl.bfloat16))
        gl.thread_barrier()
        p = p0_s.load(left)
        i = gl.arange(0, TILE, layout=gl.SliceLayout(1, right))
        word = gl.arange(0, W, layout=gl.SliceLayout(0, right))
        token, ok = _window(i, sinks, recents, length, SINK, RECENT)
        index = gl.load(exact_index + seq * (SINK + RECENT) + i, mask=ok, other=0)
        latent = exact_ptr + (index.to(gl.int64) * D)[:, None] + word[None, :]
        ok = ok[:, None]
        o0 = mma_v2(p, gl.load(latent, mask=ok, other=0.0), o0)
        o1 = mma_v2(p, gl.load(latent + W, mask=ok, other=0.0), o1)
        o2 = mma_v2(p, gl.load(latent + 2 * W, mask=ok, other=0.0), o2)
        o3 = mma_v2(p, gl.load(latent + 3 * W, mask=ok, other=0.0), o3)
        o4 = mma_v2(p, gl.load(latent + 4 * W, mask=ok, other=0.0), o4)
        o5 = mma_v2(p, gl.load(latent + 5 * W, mask=ok, other=0.0), o5)
        o6 = mma_v2(p, gl.load(latent + 6 * W, mask=ok, other=0.0), o6)
        o7 = mma_v2(p, gl.load(latent + 7 * W, mask=ok, other=0.0), o7)
    else:
        tiles = (end - begin + TILE - 1) // TILE
        attempt = 0
        while attempt < 2:
            o0 = zero
            o1 = zero
            o2 = zero
            o3 = zero
            o4 = zero
            o5 = zero
            o6 = zero
            o7 = zero
            total = none
            f0 = none
            f1 = none
            f2 = none
            f3 = none
            top = none - float("inf")
            if attempt > 0:
                slot = _slots(table, begin, end, TILE, PAGE, CL)
                slot_p = _slots(table, begin, end, TILE, PAGE, PL)
                _copy_tile(rows16, rows32, slot, slot_p, code_s.index(0), rope_s.index(0), par_s.index(0),
                           W, DR, G, ROW16, CL, PL)  # fmt: skip
            slot = _slots(table, begin + TILE, end, TILE, PAGE, CL)
            slot_p = _slots(table, begin + TILE, end, TILE, PAGE, PL)
            for tile in range(tiles):
                stage = tile % STAGES
                other = (tile + 1) % STAGES
                ahead = begin + (tile + 1) * TILE
                async_copy.wait_group(0)
                gl.thread_barrier()
                _copy_tile(rows16, rows32, slot, slot_p, code_s.index(other), rope_s.index(other),
                           par_s.index(other), W, DR, G, ROW16, CL, PL)  # fmt: skip
                slot = _slots(table, ahead + TILE, end, TILE, PAGE, CL)
                slot_p = _slots(table, ahead + TILE, end, TILE, PAGE, PL)

                # Logits: two planes a group, each group scaled by its own parameters. Steps of 16 words
                # over several accumulators keep the matrix unit's pipeline full.
                keys = rope_s.index(stage).permute((1, 0))
                codes = code_s.index(stage).permute((1, 0))
                u = blank
                s0 = blank
                s1 = blank
                for k in gl.static_range(W // 16):
                    low = codes.slice(16 * k, 16, dim=0).load(right)
                    s0 = mma_v2(q_s.index(0).slice(16 * k, 16, dim=1).load(left), _plane(low, 0), s0)
                    s1 = mma_v2(q_s.index(2).slice(16 * k, 16, dim=1).load(left), _plane(low, 2), s1)
                    key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
                    u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
                    s0 = mma_v2(q_s.index(1).slice(16 * k, 16, dim=1).load(left), _plane(low, 1), s0)
                    s1 = mma_v2(q_s.index(3).slice(16 * k, 16, dim=1).load(left), _plane(low, 3), s1)
                s2 = blank
                s3 = blank
                for k in gl.static_range(W // 16):
                    high = _high(codes.slice(16 * k, 16, dim=0).load(right))
                    s2 = mma_v2(q_s.index(4).slice(16 * k, 16, dim=1).load(left), _plane(high, 0), s2)
                    s3 = mma_v2(q_s.index(6).slice(16 * k, 16, dim=1).load(left), _plane(high, 2), s3)
                    s2 = mma_v2(q_s.index(5).slice(16 * k, 16, dim=1).load(left), _plane(high, 1), s2)
                    s3 = mma_v2(q_s.index(7).slice(16 * k, 16, dim=1).load(left), _plane(high, 3), s3)
                a, b = _group(par_s.index(stage), 0, PAIR, by_col)
                u += s0 * a[None, :]
                base = b[None, :] * c0[:, None] - m[:, None]
                a, b = _group(par_s.index(stage), 1, PAIR, by_col)
                u += s1 * a[None, :]
                base += b[None, :] * c1[:, None]
                a, b = _group(par_s.index(stage), 2, PAIR, by_col)
                u += s2 * a[None, :]
                base += b[None, :] * c2[:, None]
                a, b = _group(par_s.index(stage), 3, PAIR, by_col)
                u += s3 * a[None, :]
                base += b[None, :] * c3[:, None]
                t = u * logit + base
                token = begin + tile * TILE + gl.arange(0, TILE, layout=by_col)
                if QUERIES == 1:
                    t = gl.where((token < end)[None, :], t, float("-inf"))
                else:
                    t = gl.where(token[None, :] < gl.minimum(visible, end)[:, None], t, float("-inf"))
                if tile + attempt == 0:
                    m = gl.max(t, 1)
                    m = gl.where(m == float("-inf"), 0.0, m) - 64.0
                    t = t - m[:, None]
                # Probabilities times 2^64, and one scaled BF16 tile a group.
                p = gl.exp2(t)
                if TILE == 128:
                    t, t_2 = t.reshape([N, 2, 64]).permute([0, 2, 1]).split()
                    top = _highest(top, t_2)
                    x, x_2 = p.reshape([N, 2, 64]).permute([0, 2, 1]).split()
                    total = _add_tokens(_add_tokens(total, x), x_2)
                else:
                    total = _add_tokens(total, p)
                top = _highest(top, t)
                f0 = _weigh(p, par_s.index(stage), p0_s, f0, 0, TILE, PAIR, by_col, OWN)
                f1 = _weigh(p, par_s.index(stage), p1_s, f1, 1, TILE, PAIR, by_col, OWN)
                f2 = _weigh(p, par_s.index(stage), p2_s, f2, 2, TILE, PAIR, by_col, OWN)
                f3 = _weigh(p, par_s.index(stage), p3_s, f3, 3, TILE, PAIR, by_col, OWN)
                gl.thread_barrier()
                for k in gl.static_range(TILE // 16):
                    low = code_s.index(stage).slice(16 * k, 16, dim=0).load(right)
                    high = _high(low)
                    w = p0_s.slice(16 * k, 16, dim=1).load(left)
                    o0 = mma_v2(w, _plane(low, 0), o0)
                    o1 = mma_v2(w, _plane(low, 1), o1)
                    w = p1_s.slice(16 * k, 16, dim=1).load(left)
                    o2 = mma_v2(w, _plane(low, 2), o2)
                    o3 = mma_v2(w, _plane(low, 3), o3)
                    w = p2_s.slice(16 * k, 16, dim=1).load(left)
                    o4 = mma_v2(w, _plane(high, 0), o4)
                    o5 = mma_v2(w, _plane(high, 1), o5)
                    w = p3_s.slice(16 * k, 16, dim=1).load(left)
                    o6 = mma_v2(w, _plane(high, 2), o6)
                    o7 = mma_v2(w, _plane(high, 3), o7)
            async_copy.wait_group(0)
            # The first tile's maximum served as reference. BF16 and fp32 keep their precision within
            # 2^40 of it; beyond, once more with the maximum that is now known.
            excess = gl.convert_layout(gl.max(gl.max(top, 2), 1), by_row) - 64.0
            attempt += 1
            if gl.max(excess, 0) <= 40.0:
                attempt += 1
            else:
                m += gl.where(excess > 0.0, excess, 0.0)

    count = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), by_row)
    inverse = gl.where(count > 0.0, 1.0 / count, 0.0)
    f0 = (gl.convert_layout(gl.sum(gl.sum(f0, 2), 1), by_row) * inverse)[:, None]
    f1 = (gl.convert_layout(gl.sum(gl.sum(f1, 2), 1), by_row) * inverse)[:, None]
    f2 = (gl.convert_layout(gl.sum(gl.sum(f2, 2), 1), by_row) * inverse)[:, None]
    f3 = (gl.convert_layout(gl.sum(gl.sum(f3, 2), 1), by_row) * inverse)[:, None]
    place = item * gl.num_programs(1) + block
    gl.store(lse_ptr + place * N + gl.arange(0, N, layout=by_row), m + gl.log2(count))
    inverse = (inverse * fall)[:, None]
    out = part_ptr + place.to(gl.int64) * (D * N) + (gl.arange(0, N, layout=by_row) * D)[:, None]
    out += gl.arange(0, W, layout=by_col)[None, :]
    gl.store(out, (o0 * lift) * inverse + f0)
    gl.store(out + 4 * W, (o4 * lift) * inverse + f2)
    lift *= step
    gl.store(out + 1 * W, (o1 * lift) * inverse + f0)
    gl.store(out + 5 * W, (o5 * lift) * inverse + f2)
    lift *= step
    gl.store(out + 2 * W, (o2 * lift) * inverse + f1)
    gl.store(out + 6 * W, (o6 * lift) * inverse + f3)
    lift *= step
    gl.store(out + 3 * W, (o3 * lift) * inverse + f1)
    gl.store(out + 7 * W, (o7 * lift) * inverse + f3)
