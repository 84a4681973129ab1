"""Products of the Gluon decode kernel: logits of a tile, its weights, weights times codes."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rolaq.kernels.gluon_operands import (
    ROWS,
    TILE,
    add_products,
    all_planes,
    group,
    put,
    reciprocal,
    round_bf16,
    widen,
)


@gluon.jit
def queries(base, row, inside, q_s, sum_s, scale, W: gl.constexpr, G: gl.constexpr, LAYOUT: gl.constexpr):
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
def logits(
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
        planes = all_planes(words)
        now = q
        if k + 1 < W // 16:
            words = codes.slice(16 * k + 16, 16, dim=0).load(right)
            q = ()
            for j in gl.static_range(8):
                q = q + (q_s.index(j).slice(16 * k + 16, 16, dim=1).load(left),)
        for i in gl.static_range(8):
            s = put(
                s,
                i % G,
                mma_v2(now[(i % G) * (8 // G) + i // G], planes[(i % G) * (8 // G) + i // G], s[i % G]),
            )
        if k < DR // 16:
            key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
            u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
        if k < G:
            a, b = group(par_s, k, PAIR, by_col)
            base += b[None, :] * sums[k][:, None]
    for k in gl.static_range(W // 16, DR // 16):
        key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
    for g in gl.static_range(G):
        a, b = group(par_s, g, PAIR, by_col)
        u += s[g] * a[None, :]
    return u * logit + base


@gluon.jit
def weigh(p, par_s, p_s, G: gl.constexpr, PAIR: gl.constexpr, by_col: gl.constexpr):
    """Store each group's weights `p a` rounded to BF16, and return them."""
    weights = ()
    for g in gl.static_range(G):
        a, _b = group(par_s, g, PAIR, by_col)
        w = round_bf16(p * a[None, :])
        p_s.index(g).store(w)
        weights = weights + (w,)
    return weights


@gluon.jit
def values(
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
        planes = all_planes(code_s.slice(16 * k, 16, dim=0).load(right))
        for g in gl.static_range(G):
            w = p_s.index(g).slice(16 * k, 16, dim=1).load(left)
            for i in gl.static_range(8 // G):
                o = put(o, g * (8 // G) + i, mma_v2(w, planes[g * (8 // G) + i], o[g * (8 // G) + i]))
        if k < G:
            a, b = group(par_s, k, PAIR, by_col)
            f = put(f, k, add_products(f[k], widen(weights[k]), b * reciprocal(a), OWN))
    return o, f
