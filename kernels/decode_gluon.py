"""INT2 MLA decode on the matrix units: one work item of the plan per program (Gluon, `mma.sync`).

Query columns (query token, head) are the 16 rows of a matrix instruction, tokens or latent words its
columns. Eight warps make logits and weights (`gluon_logits`), eight others copy tiles and add up the output
(`gluon_values`), a tile behind. `kernels/README.md` derives the powers of two. Same arguments and results
as `decode_portable`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rolaq.kernels.gluon_logits import logits
from rolaq.kernels.gluon_operands import ROWS, TILE, WARPS, barrier
from rolaq.kernels.gluon_protected import protected
from rolaq.kernels.gluon_values import values

# Of a launch: one program fills a multiprocessor, 128 registers a thread on average.
OPTIONS = {"num_warps": 8, "maxnreg": 128}
LOGIT_REGISTERS = gl.constexpr(176)
STAGES = gl.constexpr(3)


@gluon.jit
def _packed(
    q_base, r_base, rows16, rows32, table, part_at, lse_at, block, q_col, r_col, begin, end, length, scale,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """An item of packed rows: shared memory and barriers, then the two kinds of warps."""
    W: gl.constexpr = D // 8
    G: gl.constexpr = D // 128
    SW: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // W, W // 8, [1, 0])
    SR: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // DR, DR // 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    code_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, W], SW)
    rope_s = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, DR], SR)
    par_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE, 2 * G], PLAIN)
    weight_s = gl.allocate_shared_memory(
        gl.bfloat16, [2, G // 2, 2, ROWS, TILE], gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0])
    )
    part_s = gl.allocate_shared_memory(
        gl.float32, [G // 2, 2, ROWS, TILE], gl.SwizzledSharedLayout(8, 1, 8, [3, 2, 1, 0])
    )
    qr_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DR], SR)
    sum_s = gl.allocate_shared_memory(gl.float32, [G // 2, 2, ROWS], PLAIN)
    # The warps' parts of sums by row: probabilities (an attempt each), offsets, rounded weights.
    total_s = gl.allocate_shared_memory(gl.float32, [4, WARPS, ROWS], PLAIN)
    mean_s = gl.allocate_shared_memory(gl.float32, [G, WARPS, ROWS], PLAIN)
    rounded_s = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, 8], PLAIN3)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    last = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(last, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * WARPS)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(done.index(i), count=1)
    barrier()
    gl.warp_specialize(
        [
            (
                values,
                (
                    rows16, rows32, table, part_at, begin, end, code_s, rope_s, par_s, weight_s._reinterpret(gl.bfloat16, [G, 2, ROWS, TILE], CUBE), total_s, mean_s._reinterpret(gl.float32, [G, WARPS, ROWS], PLAIN3), rounded_s, full, ready, free, done, last, D, DR, PAGE, STAGES,
                ),
            ),
            (
                logits,
                (
                    q_base, r_base, lse_at, block, q_col, r_col, begin, end, length, scale, code_s, rope_s, par_s,
                    weight_s, qr_s, sum_s, part_s, total_s, mean_s, rounded_s, full, ready, free, done, last,
                    QUERIES, HEADS, D, DR, STAGES,
                ),
            ),
        ],
        [WARPS],
        [LOGIT_REGISTERS],
    )  # fmt: skip


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
    item = gl.program_id(0)
    block = gl.program_id(1)
    kind = gl.load(items_ptr + item * 4 + 3)
    seq = gl.load(items_ptr + item * 4)
    begin = gl.load(items_ptr + item * 4 + 1)
    end = gl.load(items_ptr + item * 4 + 2)
    if kind != 0:
        length = gl.load(lengths_ptr + seq)
        table = table_ptr + seq.to(gl.int64) * table_row
        place = item * gl.num_programs(1) + block
        part_at = part_ptr + place.to(gl.int64) * (D * ROWS)
        lse_at = lse_ptr + place * ROWS
        q_base = q_ptr + seq.to(gl.int64) * q_row
        r_base = q_rope_ptr + seq.to(gl.int64) * r_row
        if kind == 1:
            _packed(
                q_base, r_base, rows16, rows32, table, part_at, lse_at, block, q_col, r_col, begin, end, length,
                scale, QUERIES, HEADS, D, DR, PAGE,
            )  # fmt: skip
        elif SINK + RECENT > 0:
            p_s = gl.allocate_shared_memory(
                gl.bfloat16, [ROWS, TILE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
            )
            protected(
                q_base, r_base, rows16, exact_ptr, exact_index + seq * (SINK + RECENT), window_ptr + seq * 2,
                table, part_at, lse_at, block, q_col, r_col, length, scale, p_s,
                QUERIES, HEADS, D, DR, PAGE, SINK, RECENT,
            )  # fmt: skip
