"""The logit warps of the Gluon decode kernel: logits, probabilities, weights."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rolaq.kernels.gluon_operands import (
    APART,
    FLAT,
    HALVES,
    LIMIT,
    ROWS,
    TILE,
    WARPS,
    barrier,
    bits,
    half_selector,
    halves,
    own,
    own_tokens,
    pair_halves,
    planes,
    put,
    round_bf16,
    total_of,
    warp_parts,
)


@gluon.jit
def _queries(base, block, q_col, sum_s, COLS: gl.constexpr, W: gl.constexpr, GH: gl.constexpr):
    """Query operands, 16 words of plane i of both halves each, times 2^(100 - 2i); their sums by group
    times 2^-33 into `sum_s [GH, 2, 16]`. They stay in registers for the whole item."""
    left: gl.constexpr = gl.DotOperandLayout(0, HALVES, 2)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    at = base + col * q_col + half * (4 * W) + word
    q = ()
    for g in gl.static_range(GH):
        total = gl.zeros([2, ROWS, 16], gl.float32, left)
        for i in gl.static_range(4 // GH):
            for k in gl.static_range(W // 16):
                x = gl.load(at + ((g * (4 // GH) + i) * W + 16 * k), mask=col < COLS, other=0.0).to(
                    gl.float32
                )
                total += x
                q = q + ((x * 2.0 ** (100 - 2 * (g * (4 // GH) + i))).to(gl.bfloat16),)
        sum_s.index(g).store(gl.sum(total, 2) * 2.0**-33)
    return q


@gluon.jit
def _rope_queries(base, block, r_col, qr_s, COLS: gl.constexpr, DR: gl.constexpr):
    """RoPE queries times 2^-33 into `qr_s [DR / 32, 2, 16, 16]`, 16 coordinates of each half a piece."""
    left: gl.constexpr = gl.DotOperandLayout(0, HALVES, 2)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    at = base + col * r_col + half * (DR // 2) + word
    for k in gl.static_range(DR // 32):
        x = gl.load(at + 16 * k, mask=col < COLS, other=0.0).to(gl.float32)
        qr_s.index(k).store((x * 2.0**-33).to(gl.bfloat16))


@gluon.constexpr_function
def _half_rows(groups):
    """Parameters of a half's groups for each token of a thread in HALVES, `[TILE, 2 groups]`."""
    within = [[0, 1], [0, 2]][: groups // 2]
    return gl.DistributedLinearLayout(
        within + [[1, 0], [4 * WARPS.value, 0], [8 * WARPS.value, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[i, 0] for i in bits(8, 4 * WARPS.value)] + [[0, groups]],
        [],
        [TILE.value, 2 * groups],
    )


@gluon.constexpr_function
def _flat_rows(groups):
    """Parameters of one half's groups for each token of a thread in FLAT, `[TILE, groups]`."""
    within = [[0, 1], [0, 2]][: groups // 2]
    return gl.DistributedLinearLayout(
        within + [[1, 0], [8 * WARPS.value, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[i, 0] for i in bits(8, 8 * WARPS.value)],
        [],
        [TILE.value, groups],
    )


@gluon.jit
def _by_half_token(x):
    return gl.convert_layout(x.permute([1, 0]), gl.SliceLayout(1, HALVES), assert_trivial=True)[:, None, :]


@gluon.jit
def _half_parameters(par_s, GH: gl.constexpr):
    """Scales and offsets by token of each half's groups, GH of `[2, 1, 64]` each."""
    a, b = par_s.load(_half_rows(2 * GH)).reshape([TILE, 2, GH, 2]).split()
    if GH == 1:
        return (_by_half_token(a.reshape([TILE, 2])),), (_by_half_token(b.reshape([TILE, 2])),)
    else:
        a0, a1 = a.split()
        b0, b1 = b.split()
        return (_by_half_token(a0), _by_half_token(a1)), (_by_half_token(b0), _by_half_token(b1))


@gluon.jit
def _by_token(x):
    return gl.convert_layout(x, gl.SliceLayout(0, FLAT), assert_trivial=True)


@gluon.jit
def _parameters(par_s, h: gl.constexpr, GH: gl.constexpr):
    """Scales and offsets by token of the groups of half h, GH of `[64]` each."""
    rows = par_s.slice(2 * GH * h, 2 * GH, dim=1).load(_flat_rows(2 * GH)).reshape([TILE, GH, 2])
    a, b = rows.split()
    if GH == 1:
        return (_by_token(a.reshape([TILE])),), (_by_token(b.reshape([TILE])),)
    else:
        a0, a1 = a.split()
        b0, b1 = b.split()
        return (_by_token(a0), _by_token(a1)), (_by_token(b0), _by_token(b1))


@gluon.jit
def _half_logits(
    q, qr_s, sum_s, code_s, rope_s, par_s, selector, W: gl.constexpr, DR: gl.constexpr, GH: gl.constexpr
):
    """Each half's part of the logits, `[2, 16, 64]`: its groups, its half of the RoPE coordinates."""
    right: gl.constexpr = gl.DotOperandLayout(1, HALVES, 2)
    codes = code_s.permute((1, 0))
    s = (gl.zeros([2, ROWS, TILE], gl.float32, HALVES),) * GH
    a, b = _half_parameters(par_s, GH)
    for k in gl.static_range(W // 16):
        plane = planes(halves(codes.slice(16 * k, 16, dim=0).load(gl.SliceLayout(0, right)), selector))
        for i in gl.static_range(4 // GH):
            for g in gl.static_range(GH):
                x = q[(g * (4 // GH) + i) * (W // 16) + k]
                s = put(s, g, mma_v2(x, plane[g * (4 // GH) + i], s[g]))
    u = b[0] * sum_s.index(0).load(gl.SliceLayout(2, HALVES))[:, :, None]
    u = s[0] * a[0] + u
    if GH == 2:
        u = b[1] * sum_s.index(1).load(gl.SliceLayout(2, HALVES))[:, :, None] + u
        u = s[1] * a[1] + u
    keys = rope_s.reshape([TILE, 2, DR // 2]).permute((1, 2, 0))
    for k in gl.static_range(DR // 32):
        key = keys.slice(16 * k, 16, dim=1).load(right).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.index(k).load(gl.DotOperandLayout(0, HALVES, 2)), key, u)
    return u


@gluon.jit
def _ones(column: gl.constexpr):
    """`[WARPS, 16, 8]`: ones in one column."""
    right: gl.constexpr = gl.DotOperandLayout(1, APART, 2)
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    ones = gl.where(col == column, 1.0, 0.0).to(gl.bfloat16)
    return ones + gl.zeros([WARPS, 16, 8], gl.bfloat16, right)


@gluon.jit
def _count_weights(sums, weights, column: gl.constexpr):
    """Add the weights of all tokens, `[16, 64]`, to a column of `sums [WARPS, 16, 8]`: each warp its own."""
    left: gl.constexpr = gl.DotOperandLayout(0, APART, 2)
    mine = weights.reshape([ROWS, 2, WARPS, 8]).permute([2, 0, 1, 3]).reshape([WARPS, ROWS, 16])
    return mma_v2(gl.convert_layout(mine, left, assert_trivial=True), _ones(column), sums)


@gluon.jit
def _half(cube_s, dtype: gl.constexpr, h: gl.constexpr):
    """Half h of a buffer `[2, 16, 64]`, as a matrix."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return cube_s._reinterpret(dtype, [2, ROWS, TILE], layout).index(h)


@gluon.jit
def _stack(weights, GH: gl.constexpr):
    """Weights of the low half's groups, then the high half's → `[GH, 2, 16, 64]`, moving nothing."""
    if GH == 1:
        return pair_halves(weights[0], weights[1]).reshape([1, 2, ROWS, TILE])
    else:
        return gl.join(pair_halves(weights[0], weights[2]), pair_halves(weights[1], weights[3])).permute(
            [3, 0, 1, 2]
        )


@gluon.jit
def _give(part_s, x):
    """Each warp's part of a value by row, `[16, WARPS]`, into `part_s [WARPS, 16]`."""
    part_s.store(x.permute([1, 0]))


@gluon.jit
def logits(
    q_base, r_base, lse_at, block, q_col, r_col, begin, end, length, scale,
    code_s, rope_s, par_s, weight_s, qr_s, sum_s, part_s, total_s, mean_s, rounded_s, full, ready, free, done, last,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """For each tile of the item: logits, probabilities relative to the first tile's maximum, and weights
    `p a` for the value warps. What exceeds that maximum by more than 2^40 makes them all start again."""
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    GH: gl.constexpr = G // 2
    by_row: gl.constexpr = gl.SliceLayout(1, FLAT)
    by_col: gl.constexpr = gl.SliceLayout(0, FLAT)
    selector = half_selector(gl.DotOperandLayout(1, HALVES, 2))
    q = _queries(q_base, block, q_col, sum_s, QUERIES * HEADS, W, GH)
    _rope_queries(r_base, block, r_col, qr_s, QUERIES * HEADS, DR)
    barrier()
    visible = length - QUERIES + 1 + (block * ROWS + gl.arange(0, ROWS, layout=by_row)) // HEADS
    logit = scale * 2.0**33
    none, _b, _c, _d = own_tokens(gl.zeros([ROWS, TILE], gl.float32, FLAT))
    OWN: gl.constexpr = gl.SliceLayout(0, none.type.layout)
    m = gl.zeros([ROWS], gl.float32, by_row)
    first = begin - begin % TILE
    tiles = (end - first + TILE - 1) // TILE
    count = 0
    attempt = 0
    more = 1
    n = m
    f = (none,) * G
    weight_sums = gl.zeros([WARPS, ROWS, 8], gl.float32, APART)
    while more > 0:
        f = (none,) * G
        total = none
        weight_sums = gl.zeros([WARPS, ROWS, 8], gl.float32, APART)
        for tile in range(tiles):
            stage = count % STAGES
            buffer = count % 2
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            par = par_s.index(stage)
            u = _half_logits(
                q, qr_s, sum_s, code_s.index(stage), rope_s.index(stage), par, selector, W, DR, GH
            )
            part = part_s.index(buffer)
            part.store(u)
            barrier()
            t = (_half(part, gl.float32, 0).load(FLAT) + _half(part, gl.float32, 1).load(FLAT)) * logit
            t -= m[:, None]
            if (tile == 0) | (tile + 1 == tiles) | (QUERIES > 1):
                token = first + tile * TILE + gl.arange(0, TILE, layout=by_col)[None, :]
                seen = (token >= begin) & (token < gl.minimum(visible, end)[:, None])
                t = gl.where(seen, t, float("-inf"))
            if count == 0:
                x0, x1, x2, x3 = own_tokens(t)
                top = gl.max(gl.maximum(gl.maximum(x0, x1), gl.maximum(x2, x3)), 2)
                _give(total_s.index(3), top)
                barrier()
                m = gl.convert_layout(gl.max(warp_parts(total_s.index(3)), 0), by_row, assert_trivial=True)
                m = gl.where(m == float("-inf"), 0.0, m) - 64.0
                t = t - m[:, None]
            p = gl.exp2(t)  # the probabilities times 2^64
            x0, x1, x2, x3 = own_tokens(p)
            total += (x0 + x1) + (x2 + x3)
            weights = ()
            for h in gl.static_range(2):
                a, b = _parameters(par, h, GH)
                for g in gl.static_range(GH):
                    w = round_bf16(p * a[g][None, :])
                    weights = weights + (w,)
                    c0, c1, c2, c3 = own(b[g] + 1.5 * a[g], OWN)
                    f = put(f, h * GH + g, f[h * GH + g] + x0 * c0 + x1 * c1 + x2 * c2 + x3 * c3)
                    weight_sums = _count_weights(weight_sums, w, 2 * g + h)
            mbarrier.wait(free.index(buffer), ((count // 2) & 1) ^ 1)
            weight_s.index(buffer).store(_stack(weights, GH))
            mbarrier.arrive(ready.index(buffer), count=1)
            count += 1
        _give(total_s.index(attempt % 4), gl.sum(total, 2))
        mbarrier.arrive(done.index(attempt % 4), count=1)
        n = total_of(total_s.index(attempt % 4), by_row)
        # BF16 and fp32 keep their precision within 2^40 of the reference; beyond, with a higher one again.
        again = n >= LIMIT
        attempt += 1
        more = gl.max(again.to(gl.int32), 0)
        m += gl.where(again, gl.minimum(gl.log2(n), 128.0) - 64.0, 0.0)
    gl.store(lse_at + gl.arange(0, ROWS, layout=by_row), m + gl.log2(n))
    for h in gl.static_range(2):
        for g in gl.static_range(GH):
            _give(mean_s.index(2 * g + h), gl.sum(f[h * GH + g], 2))
    rounded_s.store(weight_sums)
    mbarrier.arrive(last, count=1)
