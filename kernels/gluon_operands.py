"""Operands of the Gluon decode kernel: bit planes of 16-bit words as BF16, conversions, layouts."""

# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed in Triton 3.7
WARPS = gl.constexpr(8)  # of each of the two kinds
TILE = gl.constexpr(128)  # tokens of one iteration, 16 a warp
ROWS = gl.constexpr(16)  # query columns of one program
LIMIT = gl.constexpr(2.0**104)  # of a sum of probabilities: beyond, the item is done again
# Both halves of a word (planes 0 to 3, planes 4 to 7) side by side: two warps a half, two along N.
HALVES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 1, WARPS // 2], [1, 16, 8]))
# One 16-row product, its columns over four warps.
FLAT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8]))
# A product of its own for each warp.
APART = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8]))


@gluon.jit
def _mask(words, BITS: gl.constexpr):
    """Keep one plane of two 16-bit words a register; read as BF16 the result is `code * 4^j * 2^-133`."""
    kept = gl.inline_asm_elementwise(
        "and.b32 $0, $1, " + BITS + ";", "=r,r", [words], dtype=gl.int16, is_pure=True, pack=2
    )
    return kept.to(gl.bfloat16, bitcast=True)


@gluon.jit
def planes(words):
    """The four planes of the low byte of each 16-bit word, as BF16."""
    return (
        _mask(words, "0x00030003"),
        _mask(words, "0x000c000c"),
        _mask(words, "0x00300030"),
        _mask(words, "0x00c000c0"),
    )


@gluon.jit
def half_selector(LAYOUT: gl.constexpr):
    """`[2, 1, 1]`: the byte permutation that `halves` applies for each half of a word."""
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return gl.where(half > 0, 0x3311, 0x3210).to(gl.int16)[:, None, None]


@gluon.jit
def halves(words, selector):
    """16-bit words `[K, N]` → `[2, K, N]` with the low, then the high byte in the low place. What is left
    in the other byte is masked later."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;",
        "=r,r,r",
        [words[None, :, :], selector],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def round_bf16(x):
    """fp32 → BF16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def put(values, i: gl.constexpr, x):
    """The tuple with entry i replaced."""
    return values[:i] + (x,) + values[i + 1 :]


@gluon.jit
def own_tokens(x):
    """A thread's four tokens of each row, `[16, TILE]` → `[16, WARPS, 4]` each, moving nothing."""
    first, second = x.reshape([16, 2, WARPS, 4, 2]).permute([0, 2, 3, 1, 4]).split()
    a, b = first.split()
    c, d = second.split()
    return a, b, c, d


@gluon.jit
def own(x, LAYOUT: gl.constexpr):
    """A value by token, `[TILE]` → the thread's four tokens, `[1, WARPS, 4]` each."""
    first, second = x.reshape([2, WARPS, 4, 2]).permute([1, 2, 0, 3]).split()
    a, b = first.split()
    c, d = second.split()
    a = gl.convert_layout(a, LAYOUT, assert_trivial=True)[None, :, :]
    b = gl.convert_layout(b, LAYOUT, assert_trivial=True)[None, :, :]
    c = gl.convert_layout(c, LAYOUT, assert_trivial=True)[None, :, :]
    d = gl.convert_layout(d, LAYOUT, assert_trivial=True)[None, :, :]
    return a, b, c, d


@gluon.jit
def pair_halves(low, high):
    """Two `[…]` tensors → `[2, …]`, moving nothing."""
    both = gl.join(low, high)
    if len(low.shape) == 1:
        return both.permute([1, 0])
    else:
        return both.permute([2, 0, 1])


@gluon.constexpr_function
def bits(first, end):
    """The powers of two from `first` up to below `end`."""
    return [first << i for i in range((end // first).bit_length() - 1)]


@gluon.constexpr_function
def _parts_layout():
    return gl.DistributedLinearLayout(
        [[i, 0] for i in bits(1, WARPS.value)] + [[0, 8]],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 0] for _ in bits(1, WARPS.value)],
        [],
        [WARPS.value, 16],
    )


@gluon.jit
def warp_parts(part_s):
    """The warps' parts of a value by row, `[WARPS, 16]`, all in each thread."""
    return part_s.load(_parts_layout())


@gluon.jit
def total_of(part_s, LAYOUT: gl.constexpr):
    """Sum of the warps' parts, `[16]`."""
    return gl.convert_layout(gl.sum(warp_parts(part_s), 0), LAYOUT, assert_trivial=True)
