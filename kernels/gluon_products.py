"""Products of the Gluon decode kernel's logit warps: queries times codes, queries times RoPE keys."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rolaq.kernels.gluon_operands import FLAT, HALVES, ROWS, TILE, WARPS, bits, halves, planes, put


@gluon.jit
def queries(base, block, q_col, scale, sum_s, COLS: gl.constexpr, W: gl.constexpr, GH: gl.constexpr):
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
                x = gl.load(at + ((g * (4 // GH) + i) * W + 16 * k), mask=col < COLS, other=0.0).to(
                    gl.float32
                )
                total += x
                q = q + ((x * 2.0 ** (100 - 2 * (g * (4 // GH) + i))).to(gl.bfloat16),)
        sum_s.index(g).store(gl.sum(total, 2) * scale)
    return q


@gluon.jit
def rope_queries(base, block, r_col, qr_s, COLS: gl.constexpr, DR: gl.constexpr):
    """RoPE queries times 2^-33 into `qr_s [16, DR]`."""
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, left))[:, None]
    at = base + col * r_col + gl.arange(0, DR, layout=gl.SliceLayout(0, left))[None, :]
    qr_s.store((gl.load(at, mask=col < COLS, other=0.0).to(gl.float32) * 2.0**-33).to(gl.bfloat16))


@gluon.constexpr_function
def _flat_rows(groups):
    """All parameters of each token of a thread in FLAT, `[TILE, 2 groups]`."""
    within = [[0, i] for i in bits(1, groups)]
    return gl.DistributedLinearLayout(
        within + [[1, 0], [8 * WARPS.value, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[i, 0] for i in bits(8, 8 * WARPS.value)],
        [],
        [TILE.value, groups],
    )


@gluon.jit
def _by_token(x):
    return gl.convert_layout(x, gl.SliceLayout(0, FLAT), assert_trivial=True)


@gluon.jit
def parameters(par_s, GH: gl.constexpr):
    """Scales and offsets by token, `[TILE]` each, of all groups."""
    a, b = par_s.load(_flat_rows(4 * GH)).reshape([TILE, 2, GH, 2]).split()
    if GH == 1:
        a0, a1 = a.reshape([TILE, 2]).split()
        b0, b1 = b.reshape([TILE, 2]).split()
        return (_by_token(a0), _by_token(a1)), (_by_token(b0), _by_token(b1))
    else:
        a0, a1 = a.split()
        b0, b1 = b.split()
        a00, a10 = a0.split()
        a01, a11 = a1.split()
        b00, b10 = b0.split()
        b01, b11 = b1.split()
        return (_by_token(a00), _by_token(a01), _by_token(a10), _by_token(a11)), (
            _by_token(b00), _by_token(b01), _by_token(b10), _by_token(b11),
        )  # fmt: skip


@gluon.jit
def products(q, code_s, part_s, selector, W: gl.constexpr, GH: gl.constexpr):
    """Queries times codes by group, into `part_s [GH, 2, 16, TILE]`."""
    right: gl.constexpr = gl.DotOperandLayout(1, HALVES, 2)
    codes = code_s.permute((1, 0))
    s = (gl.zeros([2, ROWS, TILE], gl.float32, HALVES),) * GH
    for k in gl.static_range(W // 16):
        plane = planes(halves(codes.slice(16 * k, 16, dim=0).load(gl.SliceLayout(0, right)), selector))
        for i in gl.static_range(4 // GH):
            for g in gl.static_range(GH):
                x = q[(g * (4 // GH) + i) * (W // 16) + k]
                s = put(s, g, mma_v2(x, plane[g * (4 // GH) + i], s[g]))
    if GH == 1:
        part_s.store(s[0].reshape([1, 2, ROWS, TILE]))
    else:
        part_s.store(gl.join(s[0], s[1]).permute([3, 0, 1, 2]))


@gluon.jit
def rope(qr_s, rope_s, DR: gl.constexpr):
    """RoPE part of the logits, `[16, TILE]`."""
    left: gl.constexpr = gl.DotOperandLayout(0, FLAT, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, FLAT, 2)
    keys = rope_s.permute((1, 0))
    u = gl.zeros([ROWS, TILE], gl.float32, FLAT)
    for k in gl.static_range(DR // 16):
        key = keys.slice(16 * k, 16, dim=0).load(right).to(gl.bfloat16, bitcast=True)
        u = mma_v2(qr_s.slice(16 * k, 16, dim=1).load(left), key, u)
    return u
