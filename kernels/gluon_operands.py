"""Operands of the Gluon decode kernel: bit planes of 16-bit words as BF16, conversions, a thread's own tokens."""

# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed in Triton 3.7
TILE = gl.constexpr(64)  # tokens of one iteration
ROWS = gl.constexpr(16)  # query columns of one program


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
def all_planes(words):
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
def reciprocal(x):
    """1 / x in fp32, to about 2^-23."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def round_bf16(x):
    """fp32 → BF16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widen(x):
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
def put(values, i: gl.constexpr, x):
    """The tuple with entry i replaced."""
    return values[:i] + (x,) + values[i + 1 :]


@gluon.jit
def own_tokens(x):
    """A thread's four tokens of each row, `[16, 64]` → `[16, 4, 4]` each, moving nothing."""
    first, second = x.reshape([16, 2, 4, 4, 2]).permute([0, 2, 3, 1, 4]).split()
    a, b = first.split()
    c, d = second.split()
    return a, b, c, d


@gluon.jit
def own(x, LAYOUT: gl.constexpr):
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
def add_products(total, x, y, LAYOUT: gl.constexpr):
    """total + the thread's part of `sum over tokens of x y`."""
    a, b, c, d = own_tokens(x)
    p, q, r, s = own(y, LAYOUT)
    return total + a * p + b * q + c * r + d * s


@gluon.jit
def group(par_s, g: gl.constexpr, PAIR: gl.constexpr, LAYOUT: gl.constexpr):
    """Scale and offset of group g by token."""
    a, b = par_s.slice(2 * g, 2, dim=1).load(PAIR).split()
    return gl.convert_layout(a, LAYOUT, assert_trivial=True), gl.convert_layout(
        b, LAYOUT, assert_trivial=True
    )
