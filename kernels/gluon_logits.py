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
    half_selector,
    own,
    own_tokens,
    pair_halves,
    put,
    round_bf16,
    total_of,
    warp_parts,
)
from rolaq.kernels.gluon_products import parameters, products, queries, rope, rope_queries


@gluon.jit
def _ones(column: gl.constexpr):
    """`[WARPS, 16, 8]`: ones in one column."""
    right: gl.constexpr = gl.DotOperandLayout(1, APART, 2)
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    ones = gl.where(col == column, 1.0, 0.0).to(gl.bfloat16)
    return ones + gl.zeros([WARPS, 16, 8], gl.bfloat16, right)


@gluon.jit
def _count_weights(sums, weights, column: gl.constexpr):
    """Add the weights of all tokens, `[16, TILE]`, to a column of `sums [WARPS, 16, 8]`: each warp its own."""
    left: gl.constexpr = gl.DotOperandLayout(0, APART, 2)
    mine = weights.reshape([ROWS, 2, WARPS, 8]).permute([2, 0, 1, 3]).reshape([WARPS, ROWS, 16])
    return mma_v2(gl.convert_layout(mine, left, assert_trivial=True), _ones(column), sums)


@gluon.jit
def _flat(cubes_s, GROUPS: gl.constexpr):
    """A buffer `[GROUPS / 2, 2, 16, TILE]` as a matrix for each group."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return cubes_s._reinterpret(cubes_s.dtype, [GROUPS, ROWS, TILE], layout)


@gluon.jit
def _stack(weights, GH: gl.constexpr):
    """Weights of the low half's groups, then the high half's → `[GH, 2, 16, TILE]`, moving nothing."""
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
    q = queries(q_base, block, q_col, scale, sum_s, QUERIES * HEADS, W, GH)
    flat_sum_s = sum_s._reinterpret(gl.float32, [G, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rope_queries(r_base, block, r_col, qr_s, QUERIES * HEADS, DR)
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
            products(q, code_s.index(stage), part_s, selector, W, GH)
            u = rope(qr_s, rope_s.index(stage), DR)
            a, b = parameters(par_s.index(stage), GH)
            base = -m[:, None]
            for g in gl.static_range(G):
                base = b[g][None, :] * flat_sum_s.index(2 * (g % GH) + g // GH).load(by_row)[:, None] + base
            barrier()
            for h in gl.static_range(2):
                for g in gl.static_range(GH):
                    part = _flat(part_s, 2 * GH).index(2 * g + h).load(FLAT)
                    u = part * a[h * GH + g][None, :] + u
            t = u * logit + base
            if (tile == 0) | (tile + 1 == tiles) | (QUERIES > 1):
                token = first + tile * TILE + gl.arange(0, TILE, layout=by_col)[None, :]
                if QUERIES == 1:
                    seen = (token >= begin) & (token < end)
                else:
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
            for g in gl.static_range(G):
                w = round_bf16(p * a[g][None, :])
                weights = weights + (w,)
                c0, c1, c2, c3 = own(b[g] + 1.5 * a[g], OWN)
                f = put(f, g, f[g] + x0 * c0 + x1 * c1 + x2 * c2 + x3 * c3)
                weight_sums = _count_weights(weight_sums, w, 2 * (g % GH) + g // GH)
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
    n = total_of(total_s.index((attempt - 1) % 4), by_row)
    gl.store(lse_at + gl.arange(0, ROWS, layout=by_row), m + gl.log2(n))
    for h in gl.static_range(2):
        for g in gl.static_range(GH):
            _give(mean_s.index(2 * g + h), gl.sum(f[h * GH + g], 2))
    rounded_s.store(weight_sums)
    mbarrier.arrive(last, count=1)
