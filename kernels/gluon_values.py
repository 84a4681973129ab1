"""The value warps of the Gluon decode kernel: they copy tiles, multiply weights and codes, write the result."""

# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rolaq.kernels.gluon_copies import copy_tile, look_up
from rolaq.kernels.gluon_operands import (
    HALVES,
    LIMIT,
    ROWS,
    TILE,
    WARPS,
    bits,
    half_selector,
    halves,
    planes,
    put,
    total_of,
)


@gluon.jit
def _add_values(o, code_s, weight_s, first, selector, GH: gl.constexpr):
    """Add a tile's weights times codes: plane i of either half to `o[i] [2, 16, W]`."""
    left: gl.constexpr = gl.DotOperandLayout(0, HALVES, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, HALVES, 2)
    for k in gl.static_range(TILE // 16):
        words = halves(code_s.slice(16 * k, 16, dim=0).load(gl.SliceLayout(0, right)), selector)
        plane = planes(words)
        for g in gl.static_range(GH):
            w = weight_s.index(first + g).slice(16 * k, 16, dim=2).load(left)
            for i in gl.static_range(4 // GH):
                o = put(o, g * (4 // GH) + i, mma_v2(w, plane[g * (4 // GH) + i], o[g * (4 // GH) + i]))
    return o


@gluon.constexpr_function
def _half_row_layout():
    return gl.DistributedLinearLayout(
        [[0, i, 0] for i in bits(1, WARPS.value)] + [[0, 0, 8]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 0] for _ in bits(2, WARPS.value)] + [[1, 0, 0]],
        [],
        [2, WARPS.value, 16],
    )


@gluon.jit
def _by_half_row(part_s):
    """Sum of the warps' parts of a value by half and row, `[2, WARPS, 16]`."""
    x = gl.sum(part_s.load(_half_row_layout()), 1)
    return gl.convert_layout(x, gl.SliceLayout(2, HALVES), assert_trivial=True)


@gluon.jit
def _store(o, part_at, count, mean_s, rounded_s, D: gl.constexpr, GH: gl.constexpr):
    """Normalize the sums, add the offsets' part, write them: plane j carries `2^(2j - 133)`. The codes'
    mean 1.5 goes with the offset, so that the weights' rounding meets what is left of the code only."""
    W: gl.constexpr = D // 8
    inverse = gl.where(count > 0.0, 1.0 / count, 0.0)[None, :, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
    word = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, None, :]
    at = part_at + half * (4 * W) + row * D + word
    for g in gl.static_range(GH):
        mean = _by_half_row(mean_s.slice(2 * g, 2, dim=0))
        mean -= 1.5 * _by_half_row(rounded_s.permute((2, 0, 1)).slice(2 * g, 2, dim=0))
        for j in gl.static_range(4 // GH):
            x = (o[g * (4 // GH) + j] * 2.0 ** (64 - 2 * (g * (4 // GH) + j))) * (inverse * 2.0**69)
            gl.store(at + (g * (4 // GH) + j) * W, x + mean[:, :, None] * inverse)


@gluon.jit
def values(
    rows16, rows32, table, part_at, begin, end, code_s, rope_s, par_s, weight_s, total_s, mean_s, rounded_s,
    full, ready, free, done, last,
    D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the item's tiles, `STAGES - 1` ahead; as the logit warps hand over weights, add up the output;
    again from the start where they ask for it; write the item's part."""
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    GH: gl.constexpr = G // 2
    selector = half_selector(gl.DotOperandLayout(1, HALVES, 2))
    first = begin - begin % TILE
    start = first
    for i in gl.static_range(STAGES - 1):
        found = look_up(table, start, begin, end, PAGE, W, DR, G)
        copy_tile(
            rows16, rows32, found, start, begin, end, code_s.index(i), rope_s.index(i), par_s.index(i),
            full.index(i), PAGE, W, DR, G,
        )  # fmt: skip
        start = gl.where(start + TILE < end, start + TILE, first)  # after the last tile the first again
    found = look_up(table, start, begin, end, PAGE, W, DR, G)
    tiles = (end - first + TILE - 1) // TILE
    o = (gl.zeros([2, ROWS, W], gl.float32, HALVES),) * 4
    count = 0
    attempt = 0
    more = 1
    while more > 0:
        o = (gl.zeros([2, ROWS, W], gl.float32, HALVES),) * 4
        for _ in range(tiles):
            stage = count % STAGES
            buffer = count % 2
            ahead = (count + STAGES - 1) % STAGES
            mbarrier.wait(ready.index(buffer), (count // 2) & 1)
            copy_tile(
                rows16, rows32, found, start, begin, end, code_s.index(ahead), rope_s.index(ahead),
                par_s.index(ahead), full.index(ahead), PAGE, W, DR, G,
            )  # fmt: skip
            start = gl.where(start + TILE < end, start + TILE, first)
            found = look_up(table, start, begin, end, PAGE, W, DR, G)
            o = _add_values(o, code_s.index(stage), weight_s, buffer * GH, selector, GH)
            mbarrier.arrive(free.index(buffer), count=1)
            count += 1
        mbarrier.wait(done.index(attempt % 4), (attempt // 4) & 1)
        n = total_of(total_s.index(attempt % 4), gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        more = gl.max((n >= LIMIT).to(gl.int32), 0)
        attempt += 1
    mbarrier.wait(last, 0)
    n = total_of(total_s.index((attempt - 1) % 4), gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
    _store(o, part_at, n, mean_s, rounded_s, D, GH)
