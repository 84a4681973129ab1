"""Copies of the Gluon decode kernel: a tile of packed rows, through the page table, into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rolaq.kernels.gluon_operands import TILE


@gluon.jit
def _slots(table, start, last, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers of tokens `start …`; beyond `last` its row again."""
    token = gl.minimum(start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), last).to(gl.uint32)
    return gl.load(table + token // PAGE) * PAGE + (token % PAGE).to(gl.int32)


@gluon.jit
def tile_slots(table, start, end, PAGE: gl.constexpr, W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr):
    """Row numbers of tokens `start …` through the page table, in the layouts of the three copies."""
    code = _slots(table, start, end - 1, PAGE, _layout(W))
    if W == DR:
        rope = code
    else:
        rope = _slots(table, start, end - 1, PAGE, _layout(DR))
    return code, rope, _slots(table, start, end - 1, PAGE, _parameter_layout(G))


@gluon.constexpr_function
def _layout(width):
    """16 bytes of a row a thread, `width` 16-bit words a row."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _parameter_layout(groups):
    return gl.BlockedLayout([1, 4], [64 // groups, groups // 2], [4, 1], [1, 0])


@gluon.jit
def _at(base, slot, ROW: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to the first WIDTH elements of each row."""
    lane = base + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return lane + (slot.to(gl.int64) * ROW)[:, None]


@gluon.jit
def copy_tile(
    rows16, rows32, slots, code_s, rope_s, par_s, arrival, W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr
):
    """Start the copies of one tile's codes, RoPE keys and parameters; each thread arrives when its are done."""
    ROW: gl.constexpr = W + DR + 4 * G
    code = _at(rows16, slots[0], ROW, W, _layout(W))
    async_copy.async_copy_global_to_shared(code_s, code)
    if W == DR:
        async_copy.async_copy_global_to_shared(rope_s, code + W)
    else:
        async_copy.async_copy_global_to_shared(rope_s, _at(rows16, slots[1], ROW, DR, _layout(DR)) + W)
    parameter = _at(rows32, slots[2], ROW // 2, 2 * G, _parameter_layout(G))
    async_copy.async_copy_global_to_shared(par_s, parameter + (W + DR) // 2)
    async_copy.mbarrier_arrive(arrival, increment_count=False)
