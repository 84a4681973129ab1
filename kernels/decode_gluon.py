"""INT2 MLA decode on the matrix units: one work item of the plan per program (Gluon, `mma.sync`).

Query columns (query token, head) are the 16 rows of a matrix instruction, tokens or latent words its
columns. Codes become BF16 operands in registers by one AND; everything else that is large sits in shared
memory. `kernels/README.md` derives the powers of two. Same arguments and results as `decode_portable`.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed in Triton 3.7
TILE = gl.constexpr(64)  # tokens of one iteration
ROWS = gl.constexpr(16)  # query columns of one program
OPTIONS = {"num_warps": 4, "maxnreg": 255}  # of a launch: two programs a multiprocessor


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
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _put(values, i: gl.constexpr, x):
    """The tuple with entry i replaced."""
    return values[:i] + (x,) + values[i + 1 :]


@gluon.jit
def _planes(words):
    """All eight planes of 16-bit words."""
    high = _high(words)
    return (
        _plane(words, 0),
        _plane(words, 1),
        _plane(words, 2),
        _plane(words, 3),
        _plane(high, 0),
        _plane(high, 1),
        _plane(high, 2),
        _plane(high, 3),
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
def _add_products(total, x, y, LAYOUT: gl.constexpr):
    """total + the thread's part of `sum over tokens of x y`."""
    a, b, c, d = _own_tokens(x)
    p, q, r, s = _own(y, LAYOUT)
    return total + a * p + b * q + c * r + d * s


@gluon.jit
def _slots(table, start, end, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers of tokens `start …` through the page table; beyond `end` the last token's again."""
    token = gl.minimum(start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return gl.load(table + token // PAGE) * PAGE + token % PAGE


@gluon.jit
def _tile_slots(table, start, end, PAGE: gl.constexpr, CL: gl.constexpr, RL: gl.constexpr, PL: gl.constexpr):
    """`_slots` in the layouts of the three copies."""
    code = _slots(table, start, end, PAGE, CL)
    if CL == RL:
        rope = code
    else:
        rope = _slots(table, start, end, PAGE, RL)
    return code, rope, _slots(table, start, end, PAGE, PL)


@gluon.jit
def _copy(base, slot, into, start, ROW: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    at = base + (slot.to(gl.int64) * ROW)[:, None] + start
    async_copy.async_copy_global_to_shared(
        into, at + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    )


@gluon.jit
def _copy_tile(
    rows16, rows32, slots, code_s, rope_s, par_s,
    W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr, CL: gl.constexpr, RL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile's codes, RoPE keys and parameters."""
    ROW: gl.constexpr = W + DR + 4 * G
    _copy(rows16, slots[0], code_s, 0, ROW, W, CL)
    _copy(rows16, slots[1], rope_s, W, ROW, DR, RL)
    _copy(rows32, slots[2], par_s, (W + DR) // 2, ROW // 2, 2 * G, PL)
    async_copy.commit_group()


@gluon.jit
def _queries(base, row, inside, q_s, sum_s, scale, W: gl.constexpr, G: gl.constexpr, LAYOUT: gl.constexpr):
    """Plane j of the queries times 2^(100 - 2 (j mod 4)) into q_s, their sums by group into sum_s."""
    at = base + row[:, None] + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for g in gl.static_range(G):
        total = gl.zeros([ROWS, W], gl.float32, LAYOUT)
        for i in gl.static_range(8 // G):
            q = gl.load(at + (g * (8 // G) + i) * W, mask=inside[:, None], other=0.0).to(gl.float32)
            total += q
            q_s.index(g * (8 // G) + i).store(
                (q * 2.0 ** (100 - 2 * ((g * (8 // G) + i) % 4))).to(gl.bfloat16)
            )
        sum_s.index(g).store(gl.sum(total, 1) * scale)


@gluon.jit
def _window(i, sinks, recents, length, SINK: gl.constexpr, RECENT: gl.constexpr):
    """Token of protected entry i, and whether the entry is in use."""
    token = gl.where(i < SINK, i, length - RECENT - SINK + i)
    ok = gl.where(i < SINK, i < sinks, (i >= SINK + RECENT - recents) & (i < SINK + RECENT))
    return token, ok


@gluon.jit
def _group(par_s, g: gl.constexpr, PAIR: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale and offset of group g by token."""
    a, b = par_s.slice(2 * g, 2, dim=1).load(PAIR).split()
    return gl.convert_layout(a, LAYOUT, assert_trivial=True), gl.convert_layout(
        b, LAYOUT, assert_trivial=True
    )


@gluon.jit
def _logits(
    q_s, qr_s, code_s, rope_s, par_s, sums, m, logit, zero,
    W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr, PAIR: gl.constexpr,
    left: gl.constexpr, right: gl.constexpr, by_col: gl.constexpr,
):  # fmt: skip
    """Base-2 logits of a tile minus m. Steps of 16 words over several accumulators keep the matrix
    unit's pipeline full."""
    codes = code_s.permute((1, 0))
    keys = rope_s.permute((1, 0))
    u = zero
    base = zero - m[:, None]
    s = (zero,) * G
    words = codes.slice(0, 16, dim=0).load(right)
    q = ()
    for j in gl.static_range(8):
        q = q + (q_s.index(j).slice(0, 16, dim=1).load(left),)
    for k in gl.static_range(W // 16):
        planes = _planes(words)
        now = q
        if k + 1 < W // 16:
            words = codes.slice(16 * k + 16, 16, dim=0).load(right)
            q = ()
            for j in gl.static_range(8):
                q = q + (q_s.index(j).slice(16 * k + 16, 16, dim=1).load(left),)
        for i in gl.static_range(8):
            s = _put(
                s,
                i % G,
                mma_v2(now[(i % G) * (8 // G) + i // G], planes[(i % G) * (8 // G) + i // G], s[i % G]),
            )
        if k < DR // 16:
            key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
            u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
        if k < G:
            a, b = _group(par_s, k, PAIR, by_col)
            base += b[None, :] * sums[k][:, None]
    for k in gl.static_range(W // 16, DR // 16):
        key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
    for g in gl.static_range(G):
        a, b = _group(par_s, g, PAIR, by_col)
        u += s[g] * a[None, :]
    return u * logit + base


@gluon.jit
def _weigh(p, par_s, p_s, G: gl.constexpr, PAIR: gl.constexpr, by_col: gl.constexpr):
    """Store each group's weights `p a` rounded to BF16, and return them."""
    weights = ()
    for g in gl.static_range(G):
        a, _b = _group(par_s, g, PAIR, by_col)
        w = _round(p * a[None, :])
        p_s.index(g).store(w)
        weights = weights + (w,)
    return weights


@gluon.jit
def _values(
    o,
    f,
    weights,
    code_s,
    p_s,
    par_s,
    G: gl.constexpr,
    PAIR: gl.constexpr,
    left: gl.constexpr,
    right: gl.constexpr,
    by_col: gl.constexpr,
    OWN: gl.constexpr,
):
    """Add a tile's weights times codes to the eight planes of the output."""
    for k in gl.static_range(TILE // 16):
        planes = _planes(code_s.slice(16 * k, 16, dim=0).load(right))
        for g in gl.static_range(G):
            w = p_s.index(g).slice(16 * k, 16, dim=1).load(left)
            for i in gl.static_range(8 // G):
                o = _put(o, g * (8 // G) + i, mma_v2(w, planes[g * (8 // G) + i], o[g * (8 // G) + i]))
        if k < G:
            a, b = _group(par_s, k, PAIR, by_col)
            f = _put(f, k, _add_products(f[k], _widen(weights[k]), b * _reciprocal(a), OWN))
    return o, f


@gluon.jit
def _protected(
    q_s, qr_s, p_s, rows16, exact_ptr, exact_index, window, table, length, visible, logit, zero, o,
    D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr, SINK: gl.constexpr, RECENT: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Protected rows: BF16 latents by register loads; few enough that latency is all that counts."""
    W: gl.constexpr = D // 8
    ROW: gl.constexpr = W + DR + D // 32
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_col: gl.constexpr = gl.SliceLayout(0, mma)
    sinks = gl.minimum(gl.minimum(gl.load(window), SINK), length)
    recents = gl.minimum(gl.minimum(gl.load(window + 1), RECENT), length - sinks)
    i = gl.arange(0, TILE, layout=gl.SliceLayout(0, right))
    token, ok = _window(i, sinks, recents, length, SINK, RECENT)
    index = gl.load(exact_index + i, mask=ok, other=0)
    page = gl.load(table + token // PAGE, mask=ok, other=0)
    word = gl.arange(0, DR, layout=gl.SliceLayout(1, right))
    key_at = rows16 + ((page * PAGE + token % PAGE).to(gl.int64) * ROW)[None, :] + W + word[:, None]
    u = mma_v2(
        qr_s.load(left), gl.load(key_at, mask=ok[None, :], other=0).to(gl.bfloat16, bitcast=True), zero
    )
    word = gl.arange(0, W, layout=gl.SliceLayout(1, right))
    at = exact_ptr + (index.to(gl.int64) * D)[None, :] + word[:, None]
    for j in gl.static_range(8):
        s = mma_v2(q_s.index(j).load(left), gl.load(at + j * W, mask=ok[None, :], other=0.0), zero)
        u += (s * 2.0**-100) * 2.0 ** (2 * (j % 4) - 33)
    token, ok = _window(gl.arange(0, TILE, layout=by_col), sinks, recents, length, SINK, RECENT)
    t = gl.where(ok[None, :] & (token[None, :] < visible[:, None]), u * logit, float("-inf"))
    m = gl.max(t, 1)
    m = gl.where(m == float("-inf"), 0.0, m) - 64.0
    p = gl.exp2(t - m[:, None])
    p0, p1, p2, p3 = _own_tokens(p)
    total = (p0 + p1) + (p2 + p3)
    p_s.store(p.to(gl.bfloat16))
    barrier()
    i = gl.arange(0, TILE, layout=gl.SliceLayout(1, right))
    token, ok = _window(i, sinks, recents, length, SINK, RECENT)
    index = gl.load(exact_index + i, mask=ok, other=0)
    word = gl.arange(0, W, layout=gl.SliceLayout(0, right))
    at = exact_ptr + (index.to(gl.int64) * D)[:, None] + word[None, :]
    w = p_s.load(left)
    for j in gl.static_range(8):
        o = _put(o, j, mma_v2(w, gl.load(at + j * W, mask=ok[:, None], other=0.0), o[j]))
    return m, total, o


@gluon.jit
def decode_item(
    q_ptr, q_rope_ptr, rows16, rows32, exact_ptr, exact_index, window_ptr, table_ptr, lengths_ptr, items_ptr,
    part_ptr, lse_ptr, q_row, q_col, r_row, r_col, table_row, scale,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr,
    SINK: gl.constexpr, RECENT: gl.constexpr,
):  # fmt: skip
    """Partial attention of one work item and 16 query columns: `part [item, block, 16, D]`, base-2 LSE.

    `items [n, 4]` int32: sequence, first token, last token + 1, kind (0 nothing, 1 packed, 2 protected).
    `scale` is the softmax scale times log2(e).
    """
    STAGES: gl.constexpr = 2
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    COLS: gl.constexpr = QUERIES * HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_col: gl.constexpr = gl.SliceLayout(0, mma)
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DR, DR // 8], [4, 1], [1, 0])
    PL: gl.constexpr = gl.BlockedLayout([1, 4], [64 // G, G // 2], [4, 1], [1, 0])
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // W, W // 8, [1, 0])
    SR: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // DR, DR // 8, [1, 0])
    SP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Both parameters of a group for each of a thread's tokens.
    PAIR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [32, 0]], [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[8, 0], [16, 0]], [], [64, 2]
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

    q_s = gl.allocate_shared_memory(gl.bfloat16, [8, ROWS, W], SW)
    qr_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DR], SR)
    sum_s = gl.allocate_shared_memory(gl.float32, [G, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_s = gl.allocate_shared_memory(gl.bfloat16, [G, ROWS, TILE], SP)
    code_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, W], SW)
    rope_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, DR], SR)
    par_s = gl.allocate_shared_memory(
        gl.float32, [STAGES, TILE, 2 * G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )

    if kind == 1:
        slots = _tile_slots(table, begin, end, PAGE, CL, RL, PL)
        _copy_tile(
            rows16, rows32, slots, code_s.index(0), rope_s.index(0), par_s.index(0), W, DR, G, CL, RL, PL
        )
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CL))
    _queries(q_ptr + seq.to(gl.int64) * q_row, col * q_col, col < COLS, q_s, sum_s, scale, W, G, CL)
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, RL))
    at = q_rope_ptr + seq.to(gl.int64) * r_row + (col * r_col)[:, None]
    at += gl.arange(0, DR, layout=gl.SliceLayout(0, RL))[None, :]
    qr_s.store((gl.load(at, mask=(col < COLS)[:, None], other=0.0).to(gl.float32) * 2.0**-33).to(gl.bfloat16))
    barrier()
    sums = ()
    for g in gl.static_range(G):
        sums = sums + (sum_s.index(g).load(by_row),)

    visible = length - QUERIES + 1 + (block * ROWS + gl.arange(0, ROWS, layout=by_row)) // HEADS
    zero = gl.zeros([ROWS, TILE], gl.float32, mma)
    none, _b, _c, _d = _own_tokens(zero)
    OWN: gl.constexpr = gl.SliceLayout(0, none.type.layout)
    m = gl.zeros([ROWS], gl.float32, by_row)
    o = (gl.zeros([ROWS, W], gl.float32, mma),) * 8
    f = (none,) * G
    total = none
    lift = 2.0**64
    fall = 2.0**69
    step = 0.25
    logit = scale * 2.0**33
    if kind == 2:
        lift = 1.0
        fall = 1.0
        step = 1.0
        m, total, o = _protected(
            q_s, qr_s, p_s.index(0), rows16, exact_ptr, exact_index + seq * (SINK + RECENT), window_ptr + seq * 2,
            table, length, visible, logit, zero, o, D, DR, PAGE, SINK, RECENT, mma,
        )  # fmt: skip
    else:
        tiles = (end - begin + TILE - 1) // TILE
        attempt = 0
        while attempt < 2:
            o = (gl.zeros([ROWS, W], gl.float32, mma),) * 8
            f = (none,) * G
            total = none
            top = none - float("inf")
            if attempt > 0:
                slots = _tile_slots(table, begin, end, PAGE, CL, RL, PL)
                _copy_tile(
                    rows16,
                    rows32,
                    slots,
                    code_s.index(0),
                    rope_s.index(0),
                    par_s.index(0),
                    W,
                    DR,
                    G,
                    CL,
                    RL,
                    PL,
                )
            slots = _tile_slots(table, begin + TILE, end, PAGE, CL, RL, PL)
            for tile in range(tiles):
                stage = tile % STAGES
                other = (tile + 1) % STAGES
                async_copy.wait_group(0)
                barrier()
                _copy_tile(
                    rows16, rows32, slots, code_s.index(other), rope_s.index(other), par_s.index(other),
                    W, DR, G, CL, RL, PL,
                )  # fmt: skip
                slots = _tile_slots(table, begin + (tile + 2) * TILE, end, PAGE, CL, RL, PL)
                t = _logits(
                    q_s, qr_s, code_s.index(stage), rope_s.index(stage), par_s.index(stage), sums, m, logit, zero,
                    W, DR, G, PAIR, left, right, by_col,
                )  # fmt: skip
                token = begin + tile * TILE + gl.arange(0, TILE, layout=by_col)
                if QUERIES == 1:
                    t = gl.where((token < end)[None, :], t, float("-inf"))
                else:
                    t = gl.where(token[None, :] < gl.minimum(visible, end)[:, None], t, float("-inf"))
                if tile + attempt == 0:
                    m = gl.max(t, 1)
                    m = gl.where(m == float("-inf"), 0.0, m) - 64.0
                    t = t - m[:, None]
                x0, x1, x2, x3 = _own_tokens(t)
                top = gl.maximum(top, gl.maximum(gl.maximum(x0, x1), gl.maximum(x2, x3)))
                p = gl.exp2(t)  # the probabilities times 2^64
                x0, x1, x2, x3 = _own_tokens(p)
                total += (x0 + x1) + (x2 + x3)
                weights = _weigh(p, par_s.index(stage), p_s, G, PAIR, by_col)
                barrier()
                o, f = _values(
                    o,
                    f,
                    weights,
                    code_s.index(stage),
                    p_s,
                    par_s.index(stage),
                    G,
                    PAIR,
                    left,
                    right,
                    by_col,
                    OWN,
                )
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
    place = item * gl.num_programs(1) + block
    row = gl.arange(0, ROWS, layout=by_row)
    gl.store(lse_ptr + place * ROWS + row, m + gl.log2(count))
    at = part_ptr + place.to(gl.int64) * (D * ROWS) + (row * D)[:, None]
    at += gl.arange(0, W, layout=by_col)[None, :]
    means = ()
    for g in gl.static_range(G):
        means = means + ((gl.convert_layout(gl.sum(gl.sum(f[g], 2), 1), by_row) * inverse)[:, None],)
    inverse = (inverse * fall)[:, None]
    for j in gl.static_range(4):
        gl.store(at + j * W, (o[j] * lift) * inverse + means[j // (8 // G)])
        gl.store(at + (j + 4) * W, (o[j + 4] * lift) * inverse + means[(j + 4) // (8 // G)])
        lift *= step
