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
    ROWS,
    TILE,
    barrier,
    half_selector,
    halves,
    own,
    own_tokens,
    pair_halves,
    planes,
    put,
    round_bf16,
)


@gluon.jit
def _queries(base, block, q_col, scale, sum_s, COLS: gl.constexpr, W: gl.constexpr, GH: gl.constexpr):
    """Query operands, 16 words of plane i of both halves each, times 2^(100 - 2i); their sums by group
    times `scale` into `sum_s [GH, 2, 16]`. They stay in registers for the whole item."""
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
                x = gl.load(at + ((g * (4 // GH) + i) * W + 16 * k), mask=col < COLS, other=0.0).to(gl.float32)
                total += x
                q = q + ((x * 2.0 ** (100 - 2 * (g * (4 // GH) + i))).to(gl.bfloat16),)
        sum_s.index(g).store(gl.sum(total, 2) * scale)
    return q


@gluon.jit
def _rope_queries(base, block, r_col, COLS: gl.constexpr, DR: gl.constexpr):
    """RoPE query operand `[16, DR]` times 2^-33."""
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, left))[:, None]
    at = base + col * r_col + gl.arange(0, DR, layout=gl.SliceLayout(0, left))[None, :]
    return (gl.load(at, mask=col < COLS, other=0.0).to(gl.float32) * 2.0**-33).to(gl.bfloat16)


@gluon.constexpr_function
def _half_rows(groups):
    """Parameters of a half's groups for each token of a thread in HALVES, `[64, 2 groups]`."""
    within = [[0, 1], [0, 2]][: groups // 2]
    return gl.DistributedLinearLayout(
        within + [[1, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[8, 0], [0, groups]],
        [],
        [64, 2 * groups],
    )


@gluon.constexpr_function
def _flat_rows(groups):
    """Parameters of one half's groups for each token of a thread in FLAT, `[64, groups]`."""
    within = [[0, 1], [0, 2]][: groups // 2]
    return gl.DistributedLinearLayout(
        within + [[1, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[8, 0], [16, 0]],
        [],
        [64, groups],
    )


@gluon.jit
def _half_scales(par_s, GH: gl.constexpr):
    """Scales by token of each half's groups: GH of `[2, 1, 64]`."""
    by_token: gl.constexpr = gl.SliceLayout(1, HALVES)
    rows = par_s.load(_half_rows(2 * GH)).reshape([TILE, 2, GH, 2])
    a, _b = rows.split()
    if GH == 1:
        x = gl.convert_layout(a.reshape([TILE, 2]).permute([1, 0]), by_token, assert_trivial=True)
        return (x[:, None, :],)
    else:
        x, y = a.split()
        x = gl.convert_layout(x.permute([1, 0]), by_token, assert_trivial=True)
        y = gl.convert_layout(y.permute([1, 0]), by_token, assert_trivial=True)
        return (x[:, None, :], y[:, None, :])


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
def _content(q, code_s, par_s, selector, W: gl.constexpr, GH: gl.constexpr):
    """Each half's part of the logits, `[2, 16, 64]`, without offsets."""
    right: gl.constexpr = gl.DotOperandLayout(1, HALVES, 2)
    codes = code_s.permute((1, 0))
    s = (gl.zeros([2, ROWS, TILE], gl.float32, HALVES),) * GH
    for k in gl.static_range(W // 16):
        plane = planes(halves(codes.slice(16 * k, 16, dim=0).load(gl.SliceLayout(0, right)), selector))
        for i in gl.static_range(4 // GH):
            for g in gl.static_range(GH):
                x = q[(g * (4 // GH) + i) * (W // 16) + k]
                s = put(s, g, mma_v2(x, plane[g * (4 // GH) + i], s[g]))
    scales = _half_scales(par_s, GH)
    u = s[0] * scales[0]
    if GH == 2:
        u += s[1] * scales[1]
    return u


@gluon.jit
def _rope(qr_s, rope_s, DR: gl.constexpr):
    """RoPE part of the logits, `[16, 64]`."""
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, FLAT, 2)
    keys = rope_s.permute((1, 0))
    u = gl.zeros([ROWS, TILE], gl.float32, FLAT)
    for k in gl.static_range(DR // 16):
        key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
    return u


@gluon.jit
def _ones(column: gl.constexpr):
    """`[4, 16, 8]`: ones in one column."""
    right: gl.constexpr = gl.DotOperandLayout(1, APART, 2)
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    ones = gl.where(col == column, 1.0, 0.0).to(gl.bfloat16)
    return ones + gl.zeros([4, 16, 8], gl.bfloat16, right)


@gluon.jit
def _count_weights(sums, weights, column: gl.constexpr):
    """Add the weights of all tokens, `[16, 64]`, to a column of `sums [4, 16, 8]`: each warp its own."""
    left: gl.constexpr = gl.DotOperandLayout(0, APART, 2)
    mine = weights.reshape([ROWS, 2, 4, 8]).permute([2, 0, 1, 3]).reshape([4, ROWS, 16])
    return mma_v2(gl.convert_layout(mine, left, assert_trivial=True), _ones(column), sums)


@gluon.jit
def _half(cube_s, dtype: gl.constexpr, h: gl.constexpr):
    """Half h of a buffer `[2, 16, 64]`, as a matrix."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return cube_s._reinterpret(dtype, [2, ROWS, TILE], layout).index(h)


@gluon.jit
def logits(
    q_base, r_base, lse_at, block, q_col, r_col, begin, end, length, scale,
    code_s, rope_s, par_s, weight_s, qr_s, sum_s, part_s, inverse_s, mean_s, again_s, full, ready, free, done,
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
    q = _queries(q_base, block, q_col, scale, sum_s, QUERIES * HEADS, W, GH)
    qr_s.store(_rope_queries(r_base, block, r_col, QUERIES * HEADS, DR))
    barrier()
    flat_sum_s = sum_s._reinterpret(gl.float32, [G, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    visible = length - QUERIES + 1 + (block * ROWS + gl.arange(0, ROWS, layout=by_row)) // HEADS
    logit = scale * 2.0**33
    none, _b, _c, _d = own_tokens(gl.zeros([ROWS, TILE], gl.float32, FLAT))
    OWN: gl.constexpr = gl.SliceLayout(0, none.type.layout)
    m = gl.zeros([ROWS], gl.float32, by_row)
    tiles = (end - begin + TILE - 1) // TILE
    count = 0
    attempt = 0
    more = 1
    while more > 0:
        f = (none,) * G
        total = none
        weight_sums = gl.zeros([4, ROWS, 8], gl.float32, APART)
        for tile in range(tiles):
            stage = count % STAGES
            buffer = count % 2
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            par = par_s.index(stage)
            half = _content(q, code_s.index(stage), par, selector, W, GH)
            part_s.index(buffer).store(half)
            u = _rope(qr_s, rope_s.index(stage), DR)
            base = -m[:, None]
            for h in gl.static_range(2):
                _a, b = _parameters(par, h, GH)
                for g in gl.static_range(GH):
                    base += b[g][None, :] * flat_sum_s.index(2 * g + h).load(by_row)[:, None]
            barrier()
            part = part_s.index(buffer)
            u += _half(part, gl.float32, 0).load(FLAT) + _half(part, gl.float32, 1).load(FLAT)
            t = u * logit + base
            token = begin + tile * TILE + gl.arange(0, TILE, layout=by_col)
            if QUERIES == 1:
                t = gl.where((token < end)[None, :], t, float("-inf"))
            else:
                t = gl.where(token[None, :] < gl.minimum(visible, end)[:, None], t, float("-inf"))
            if count == 0:
                m = gl.max(t, 1)
                m = gl.where(m == float("-inf"), 0.0, m) - 64.0
                t = t - m[:, None]
            p = gl.exp2(t)  # the probabilities times 2^64
            x0, x1, x2, x3 = own_tokens(p)
            total += (x0 + x1) + (x2 + x3)
            mbarrier.wait(free.index(buffer), ((count // 2) & 1) ^ 1)
            for h in gl.static_range(2):
                a, b = _parameters(par, h, GH)
                for g in gl.static_range(GH):
                    w = round_bf16(p * a[g][None, :])
                    _half(weight_s.index(buffer * GH + g), gl.bfloat16, h).store(w)
                    c0, c1, c2, c3 = own(b[g] + 1.5 * a[g], OWN)
                    f = put(f, h * GH + g, f[h * GH + g] + x0 * c0 + x1 * c1 + x2 * c2 + x3 * c3)
                    weight_sums = _count_weights(weight_sums, w, h * GH + g)
            mbarrier.arrive(ready.index(buffer), count=1)
            count += 1
        n = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), by_row)
        # BF16 and fp32 keep their precision within 2^40 of the reference; beyond, with a higher one again.
        again = n >= 2.0**104
        again_s.index(attempt % 4).store(again.to(gl.int32))
        inverse = gl.where(n > 0.0, 1.0 / n, 0.0)
        inverse_s.store(inverse)
        gl.store(lse_at + gl.arange(0, ROWS, layout=by_row), m + gl.log2(n))
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, APART)))[None, None, :]
        means = ()
        for g in gl.static_range(G):
            rounded = gl.sum(gl.sum(gl.where(column == g, weight_sums, 0.0), 2), 0)
            mean = gl.convert_layout(gl.sum(gl.sum(f[g], 2), 1), by_row)
            means = means + ((mean - 1.5 * gl.convert_layout(rounded, by_row)) * inverse,)
        for g in gl.static_range(GH):
            mean_s.index(g).store(pair_halves(means[g], means[GH + g]))
        mbarrier.arrive(done.index(attempt % 4), count=1)
        attempt += 1
        more = gl.max(again.to(gl.int32), 0)
        m += gl.where(again, gl.minimum(gl.log2(n), 128.0) - 64.0, 0.0)
