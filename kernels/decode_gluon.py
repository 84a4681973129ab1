"""INT2 MLA decode on the matrix units: one work item of the plan per program (Gluon, `mma.sync`).

Query columns (query token, head) are the 16 rows of a matrix instruction, tokens or latent words its
columns. Codes become BF16 operands in registers by one AND; everything else that is large sits in shared
memory. `kernels/README.md` derives the powers of two. Same arguments and results as `decode_portable`.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 (tuples grow by concatenation: the compiler knows no unpacking)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rolaq.kernels.gluon_copies import copy_tile, tile_slots
from rolaq.kernels.gluon_operands import ROWS, TILE, barrier, own_tokens
from rolaq.kernels.gluon_products import logits, queries, values, weigh
from rolaq.kernels.gluon_protected import protected

OPTIONS = {"num_warps": 4, "maxnreg": 255}  # of a launch: two programs a multiprocessor


@gluon.jit
def _finish(
    o, f, total, m, part_ptr, lse_ptr, item, block, lift, fall, step, D: gl.constexpr, mma: gl.constexpr
):
    """Sum what threads hold apart, normalize, and write the item's part and its LSE."""
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    count = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), by_row)
    inverse = gl.where(count > 0.0, 1.0 / count, 0.0)
    place = item * gl.num_programs(1) + block
    row = gl.arange(0, ROWS, layout=by_row)
    gl.store(lse_ptr + place * ROWS + row, m + gl.log2(count))
    at = part_ptr + place.to(gl.int64) * (D * ROWS) + (row * D)[:, None]
    at += gl.arange(0, W, layout=gl.SliceLayout(0, mma))[None, :]
    means = ()
    for g in gl.static_range(G):
        means = means + ((gl.convert_layout(gl.sum(gl.sum(f[g], 2), 1), by_row) * inverse)[:, None],)
    inverse = (inverse * fall)[:, None]
    for j in gl.static_range(4):
        gl.store(at + j * W, (o[j] * lift) * inverse + means[j // (8 // G)])
        gl.store(at + (j + 4) * W, (o[j + 4] * lift) * inverse + means[(j + 4) // (8 // G)])
        lift *= step


@gluon.jit
def decode_item(
    q_ptr, q_rope_ptr, rows16, rows32, exact_ptr, exact_index, window_ptr, table_ptr, lengths_ptr, items_ptr,
    part_ptr, lse_ptr, q_row, q_col, r_row, r_col, table_row, scale,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr,
    SINK: gl.constexpr, RECENT: gl.constexpr,
):  # fmt: skip
    """Partial attention of one work item and 16 query columns: `part [item, block, 16, D]`, base-2 LSE.

    `items [n, 4]` int32: sequence, first token, last token + 1, kind (0 nothing, 1 packed, 2 protected).
    `scale` is the softmax scale times log2(e).
    """
    STAGES: gl.constexpr = 2
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    COLS: gl.constexpr = QUERIES * HEADS
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_col: gl.constexpr = gl.SliceLayout(0, mma)
    CL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    RL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DR, DR // 8], [4, 1], [1, 0])
    PL: gl.constexpr = gl.BlockedLayout([1, 4], [64 // G, G // 2], [4, 1], [1, 0])
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // W, W // 8, [1, 0])
    SR: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // DR, DR // 8, [1, 0])
    SP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Both parameters of a group for each of a thread's tokens.
    PAIR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [32, 0]], [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[8, 0], [16, 0]], [], [64, 2]
    )

    item = gl.program_id(0)
    block = gl.program_id(1)
    kind = gl.load(items_ptr + item * 4 + 3)
    if kind == 0:
        return
    seq = gl.load(items_ptr + item * 4)
    begin = gl.load(items_ptr + item * 4 + 1)
    end = gl.load(items_ptr + item * 4 + 2)
    length = gl.load(lengths_ptr + seq)
    table = table_ptr + seq.to(gl.int64) * table_row

    q_s = gl.allocate_shared_memory(gl.bfloat16, [8, ROWS, W], SW)
    qr_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DR], SR)
    sum_s = gl.allocate_shared_memory(gl.float32, [G, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_s = gl.allocate_shared_memory(gl.bfloat16, [G, ROWS, TILE], SP)
    code_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, W], SW)
    rope_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, DR], SR)
    par_s = gl.allocate_shared_memory(
        gl.float32, [STAGES, TILE, 2 * G], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )

    if kind == 1:
        slots = tile_slots(table, begin, end, PAGE, CL, RL, PL)
        copy_tile(
            rows16, rows32, slots, code_s.index(0), rope_s.index(0), par_s.index(0), W, DR, G, CL, RL, PL
        )
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CL))
    queries(q_ptr + seq.to(gl.int64) * q_row, col * q_col, col < COLS, q_s, sum_s, scale, W, G, CL)
    col = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, RL))
    at = q_rope_ptr + seq.to(gl.int64) * r_row + (col * r_col)[:, None]
    at += gl.arange(0, DR, layout=gl.SliceLayout(0, RL))[None, :]
    qr_s.store((gl.load(at, mask=(col < COLS)[:, None], other=0.0).to(gl.float32) * 2.0**-33).to(gl.bfloat16))
    barrier()
    sums = ()
    for g in gl.static_range(G):
        sums = sums + (sum_s.index(g).load(by_row),)

    visible = length - QUERIES + 1 + (block * ROWS + gl.arange(0, ROWS, layout=by_row)) // HEADS
    zero = gl.zeros([ROWS, TILE], gl.float32, mma)
    none, _b, _c, _d = own_tokens(zero)
    OWN: gl.constexpr = gl.SliceLayout(0, none.type.layout)
    m = gl.zeros([ROWS], gl.float32, by_row)
    o = (gl.zeros([ROWS, W], gl.float32, mma),) * 8
    f = (none,) * G
    total = none
    lift = 2.0**64
    fall = 2.0**69
    step = 0.25
    logit = scale * 2.0**33
    if kind == 2:
        lift = 1.0
        fall = 1.0
        step = 1.0
        m, total, o = protected(
            q_s, qr_s, p_s.index(0), rows16, exact_ptr, exact_index + seq * (SINK + RECENT), window_ptr + seq * 2,
            table, length, visible, logit, zero, o, D, DR, PAGE, SINK, RECENT, mma,
        )  # fmt: skip
    else:
        tiles = (end - begin + TILE - 1) // TILE
        attempt = 0
        while attempt < 2:
            o = (gl.zeros([ROWS, W], gl.float32, mma),) * 8
            f = (none,) * G
            total = none
            top = none - float("inf")
            if attempt > 0:
                slots = tile_slots(table, begin, end, PAGE, CL, RL, PL)
                copy_tile(
                    rows16, rows32, slots, code_s.index(0), rope_s.index(0), par_s.index(0), W, DR, G, CL, RL, PL
                )  # fmt: skip
            slots = tile_slots(table, begin + TILE, end, PAGE, CL, RL, PL)
            for tile in range(tiles):
                stage = tile % STAGES
                other = (tile + 1) % STAGES
                async_copy.wait_group(0)
                barrier()
                copy_tile(
                    rows16, rows32, slots, code_s.index(other), rope_s.index(other), par_s.index(other),
                    W, DR, G, CL, RL, PL,
                )  # fmt: skip
                slots = tile_slots(table, begin + (tile + 2) * TILE, end, PAGE, CL, RL, PL)
                t = logits(
                    q_s, qr_s, code_s.index(stage), rope_s.index(stage), par_s.index(stage), sums, m, logit, zero,
                    W, DR, G, PAIR, left, right, by_col,
                )  # fmt: skip
                token = begin + tile * TILE + gl.arange(0, TILE, layout=by_col)
                if QUERIES == 1:
                    t = gl.where((token < end)[None, :], t, float("-inf"))
                else:
                    t = gl.where(token[None, :] < gl.minimum(visible, end)[:, None], t, float("-inf"))
                if tile + attempt == 0:
                    m = gl.max(t, 1)
                    m = gl.where(m == float("-inf"), 0.0, m) - 64.0
                    t = t - m[:, None]
                x0, x1, x2, x3 = own_tokens(t)
                top = gl.maximum(top, gl.maximum(gl.maximum(x0, x1), gl.maximum(x2, x3)))
                p = gl.exp2(t)  # the probabilities times 2^64
                x0, x1, x2, x3 = own_tokens(p)
                total += (x0 + x1) + (x2 + x3)
                weights = weigh(p, par_s.index(stage), p_s, G, PAIR, by_col)
                barrier()
                o, f = values(
                    o, f, weights, code_s.index(stage), p_s, par_s.index(stage), G, PAIR, left, right, by_col, OWN
                )  # fmt: skip
            async_copy.wait_group(0)
            # The first tile's maximum served as reference. BF16 and fp32 keep their precision within
            # 2^40 of it; beyond, once more with the maximum that is now known.
            excess = gl.convert_layout(gl.max(gl.max(top, 2), 1), by_row) - 64.0
            attempt += 1
            if gl.max(excess, 0) <= 40.0:
                attempt += 1
            else:
                m += gl.where(excess > 0.0, excess, 0.0)

    _finish(o, f, total, m, part_ptr, lse_ptr, item, block, lift, fall, step, D, mma)
