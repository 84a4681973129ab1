"""Protected rows in the Gluon decode kernel: BF16 latents by register loads."""

# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rolaq.kernels.gluon_operands import FLAT, ROWS, TILE, barrier


@gluon.jit
def _window(i, sinks, recents, length, SINK: gl.constexpr, RECENT: gl.constexpr):
    """Token of protected entry i, and whether the entry is in use."""
    token = gl.where(i < SINK, i, length - RECENT - SINK + i)
    ok = gl.where(i < SINK, i < sinks, (i >= SINK + RECENT - recents) & (i < SINK + RECENT))
    return token, ok


@gluon.jit
def _rows(base, block, stride, WIDTH: gl.constexpr, COLS: gl.constexpr):
    """`[16, WIDTH]` of the queries as a left operand."""
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, left))[:, None]
    at = base + col * stride + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, left))[None, :]
    return gl.load(at, mask=col < COLS, other=0.0)


@gluon.jit
def protected(
    q_base, r_base, rows16, exact_ptr, exact_index, window, table, part_at, lse_at, block, q_col, r_col,
    length, scale, p_s,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr,
    SINK: gl.constexpr, RECENT: gl.constexpr,
):  # fmt: skip
    """A sequence's protected rows, an item of their own; few enough that latency is all that counts."""
    W: gl.constexpr = D // 8
    ROW: gl.constexpr = W + DR + D // 32
    COLS: gl.constexpr = QUERIES * HEADS
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, FLAT, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, FLAT)
    by_col: gl.constexpr = gl.SliceLayout(0, FLAT)
    zero = gl.zeros([ROWS, TILE], gl.float32, FLAT)
    sinks = gl.minimum(gl.minimum(gl.load(window), SINK), length)
    recents = gl.minimum(gl.minimum(gl.load(window + 1), RECENT), length - sinks)
    token, ok = _window(
        gl.arange(0, TILE, layout=gl.SliceLayout(0, right)), sinks, recents, length, SINK, RECENT
    )
    index = gl.load(exact_index + gl.arange(0, TILE, layout=gl.SliceLayout(0, right)), mask=ok, other=0)
    page = gl.load(table + token // PAGE, mask=ok, other=0)
    word = gl.arange(0, DR, layout=gl.SliceLayout(1, right))
    key_at = rows16 + ((page * PAGE + token % PAGE).to(gl.int64) * ROW)[None, :] + W + word[:, None]
    key = gl.load(key_at, mask=ok[None, :], other=0).to(gl.bfloat16, bitcast=True)
    u = mma_v2(_rows(r_base, block, r_col, DR, COLS), key, zero)
    word = gl.arange(0, W, layout=gl.SliceLayout(1, right))
    at = exact_ptr + (index.to(gl.int64) * D)[None, :] + word[:, None]
    for j in gl.static_range(8):
        latents = gl.load(at + j * W, mask=ok[None, :], other=0.0)
        u = mma_v2(_rows(q_base + j * W, block, q_col, W, COLS), latents, u)
    visible = length - QUERIES + 1 + (block * ROWS + gl.arange(0, ROWS, layout=by_row)) // HEADS
    token, ok = _window(gl.arange(0, TILE, layout=by_col), sinks, recents, length, SINK, RECENT)
    t = gl.where(ok[None, :] & (token[None, :] < visible[:, None]), u * scale, float("-inf"))
    m = gl.max(t, 1)
    m = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(t - m[:, None])
    count = gl.sum(p, 1)
    inverse = gl.where(count > 0.0, 1.0 / count, 0.0)[:, None]
    row = gl.arange(0, ROWS, layout=by_row)
    gl.store(lse_at + row, m + gl.log2(count))
    p_s.store(p.to(gl.bfloat16))
    barrier()
    i = gl.arange(0, TILE, layout=gl.SliceLayout(1, right))
    token, ok = _window(i, sinks, recents, length, SINK, RECENT)
    index = gl.load(exact_index + i, mask=ok, other=0)
    word = gl.arange(0, W, layout=gl.SliceLayout(0, right))
    at = exact_ptr + (index.to(gl.int64) * D)[:, None] + word[None, :]
    w = p_s.load(left)
    to = part_at + (row * D)[:, None] + gl.arange(0, W, layout=by_col)[None, :]
    for j in gl.static_range(8):
        latents = gl.load(at + j * W, mask=ok[:, None], other=0.0)
        o = mma_v2(w, latents, gl.zeros([ROWS, W], gl.float32, FLAT))
        gl.store(to + j * W, o * inverse)
