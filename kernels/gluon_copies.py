"""Copies of the Gluon decode kernel: a tile of packed rows, through the page table, into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rolaq.kernels.gluon_operands import TILE


@gluon.jit
def _slots(table, start, end, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers of tokens `start …` through the page table; beyond `end` the last token's again."""
    token = gl.minimum(start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return gl.load(table + token // PAGE) * PAGE + token % PAGE


@gluon.jit
def tile_slots(table, start, end, PAGE: gl.constexpr, CL: gl.constexpr, RL: gl.constexpr, PL: gl.constexpr):
    """`_slots` in the layouts of the three copies."""
    code = _slots(table, start, end, PAGE, CL)
    if CL == RL:
        rope = code
    else:
        rope = _slots(table, start, end, PAGE, RL)
    return code, rope, _slots(table, start, end, PAGE, PL)


@gluon.jit
def _copy(base, slot, into, start, ROW: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    at = base + (slot.to(gl.int64) * ROW)[:, None] + start
    async_copy.async_copy_global_to_shared(
        into, at + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    )


@gluon.jit
def copy_tile(
    rows16, rows32, slots, code_s, rope_s, par_s,
    W: gl.constexpr, DR: gl.constexpr, G: gl.constexpr, CL: gl.constexpr, RL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile's codes, RoPE keys and parameters."""
    ROW: gl.constexpr = W + DR + 4 * G
    _copy(rows16, slots[0], code_s, 0, ROW, W, CL)
    _copy(rows16, slots[1], rope_s, W, ROW, DR, RL)
    _copy(rows32, slots[2], par_s, (W + DR) // 2, ROW // 2, 2 * G, PL)
    async_copy.commit_group()
