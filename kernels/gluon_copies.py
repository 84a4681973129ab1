"""Copies of the Gluon decode kernel: a tile of packed rows, through the page table, into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rolaq.kernels.gluon_operands import TILE, WARPS


@gluon.constexpr_function
def _layout(width):
    """16 bytes of a row a thread, `width` 16-bit words a row."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def _parameter_layout(groups):
    return gl.BlockedLayout([1, 4], [64 // groups, groups // 2], [WARPS.value, 1], [1, 0])


@gluon.jit
def _within(start, begin, end, LAYOUT: gl.constexpr):
    """Places in the tile at `start`, `[TILE]`; of tokens outside the item, the nearest that is inside."""
    i = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    return gl.minimum(gl.maximum(i, begin - start), end - 1 - start)


@gluon.jit
def _slots(table, start, begin, end, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers of a tile's tokens."""
    token = (start + _within(start, begin, end, LAYOUT)).to(gl.uint32)
    return gl.load(table + token // PAGE) * PAGE + (token % PAGE).to(gl.int32)


@gluon.jit
def look_up(table, start, begin, end, PAGE: gl.constexpr, W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr):
    """What the page table says of the tile at `start`, a multiple of TILE: its first row where a page holds
    whole tiles, else the rows of its tokens in the layouts of the three copies."""
    if PAGE % TILE == 0:
        return gl.load(table + start // PAGE) * PAGE + start % PAGE
    elif W == DR:
        code = _slots(table, start, begin, end, PAGE, _layout(W))
        return code, code, _slots(table, start, begin, end, PAGE, _parameter_layout(G))
    else:
        code = _slots(table, start, begin, end, PAGE, _layout(W))
        rope = _slots(table, start, begin, end, PAGE, _layout(DR))
        return code, rope, _slots(table, start, begin, end, PAGE, _parameter_layout(G))


@gluon.jit
def _at(
    base, found, i: gl.constexpr, start, begin, end,
    PAGE: gl.constexpr, ROW: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pointers to the first WIDTH elements of each row."""
    if PAGE % TILE == 0:
        slot = found + _within(start, begin, end, LAYOUT)
    else:
        slot = found[i]
    lane = base + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return lane + (slot.to(gl.int64) * ROW)[:, None]


@gluon.jit
def copy_tile(
    rows16, rows32, found, start, begin, end, code_s, rope_s, par_s, arrival,
    PAGE: gl.constexpr, W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile's codes, RoPE keys and parameters; each thread arrives when its are done."""
    ROW: gl.constexpr = W + DR + 4 * G
    code = _at(rows16, found, 0, start, begin, end, PAGE, ROW, W, _layout(W))
    async_copy.async_copy_global_to_shared(code_s, code)
    if W == DR:
        async_copy.async_copy_global_to_shared(rope_s, code + W)
    else:
        rope = _at(rows16, found, 1, start, begin, end, PAGE, ROW, DR, _layout(DR))
        async_copy.async_copy_global_to_shared(rope_s, rope + W)
    parameter = _at(rows32, found, 2, start, begin, end, PAGE, ROW // 2, 2 * G, _parameter_layout(G))
    async_copy.async_copy_global_to_shared(par_s, parameter + (W + DR) // 2)
    async_copy.mbarrier_arrive(arrival, increment_count=False)
