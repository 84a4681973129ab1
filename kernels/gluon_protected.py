"""Protected rows in the Gluon decode kernel: BF16 latents by register loads."""

# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rolaq.kernels.gluon_operands import TILE, barrier, own_tokens, put


@gluon.jit
def _window(i, sinks, recents, length, SINK: gl.constexpr, RECENT: gl.constexpr):
    """Token of protected entry i, and whether the entry is in use."""
    token = gl.where(i < SINK, i, length - RECENT - SINK + i)
    ok = gl.where(i < SINK, i < sinks, (i >= SINK + RECENT - recents) & (i < SINK + RECENT))
    return token, ok


@gluon.jit
def protected(
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
    p0, p1, p2, p3 = own_tokens(p)
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
        o = put(o, j, mma_v2(w, gl.load(at + j * W, mask=ok[:, None], other=0.0), o[j]))
    return m, total, o
