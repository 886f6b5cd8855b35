"""Out and log-sum-exp."""

import triton
import triton.language as tl

from lengthwise.attention.triton.kernels.arguments import LN2, LOG2E
from lengthwise.attention.triton.kernels.reading import (
    key_vectors,
    keys_at,
    last_block_first,
    level_at,
    numbers,
    own_place,
    put_vectors,
    rows_at,
    tiles_of,
)
from lengthwise.attention.triton.kernels.scores import product, scores_of


@triton.jit
def forward_kernel(t, z, out, lse, F: tl.constexpr, SHARED: tl.constexpr):
    """Of a block of rows; where it is the only one and SHARED, of one share of its keys."""
    p = own_place(t, z)
    block, share, shares = last_block_first(), 0, 1
    if SHARED:
        block, share, shares = tl.cast(0, tl.int32), tl.program_id(0), tl.num_programs(0)
    begin = block * F.BM
    origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + begin, F)
    rows = rows_at(t, z, F, p, begin, origin)
    ends = tiles_of(t, z, F, p, block, share, shares)
    acc = tl.zeros([F.BM, F.DV], tl.float32)
    m, total = tl.full([F.BM], float("-inf"), tl.float32), tl.zeros([F.BM], tl.float32)
    for PHASE in tl.static_range(3):
        for at in range(ends[PHASE] * F.BN, ends[PHASE + 1] * F.BN, F.BN):
            k, v = key_vectors(z, F, p, at, PHASE == 1)
            keys = keys_at(t, z, F, p, at, origin, PHASE == 1)
            s = scores_of(k, t, z, F, p, rows, keys, PHASE != 1).scores
            new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weights, shrink = tl.exp2(s - shift[:, None]), tl.exp2(m - shift)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, F)
            m = new
    if F.SINK:
        sink = numbers(t.sink + p.bh * z.queries, rows.index, z.queries) * LOG2E
        if SHARED:
            sink = tl.where(share == 0, sink, float("-inf"))
        new = tl.maximum(m, sink)
        shift = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(m - shift)
        total = total * shrink + tl.exp2(sink - shift)
        acc = acc * shrink[:, None]
        m = new
    empty = total == 0
    at = tl.cast(share, tl.int64) * z.batch * z.heads + p.bh
    mean = acc / tl.where(empty, 1.0, total)[:, None]
    put_vectors(out + at * z.queries * F.VALUE, mean, rows.index, z.queries, F.VALUE, F.DV, F)
    log_total = (m + tl.log2(tl.where(empty, 1.0, total))) * LN2
    log_total = tl.where(empty, float("-inf"), log_total)
    tl.store(lse + at * z.queries + rows.index, log_total, mask=rows.index < z.queries)
