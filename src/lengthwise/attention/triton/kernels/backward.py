"""The gradients of queries, keys and values, and of what belongs to a row or to a key."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lengthwise.attention.triton.kernels.arguments import LN2, OF_KEYS, OF_QUERIES
from lengthwise.attention.triton.kernels.reading import (
    Above,
    above_at,
    key_vectors,
    keys_at,
    last_block_first,
    level_at,
    level_differences,
    own_place,
    place_of,
    put_vectors,
    range_of,
    rows_at,
    tiles_of,
)
from lengthwise.attention.triton.kernels.scores import (
    along_curve,
    curve_of,
    gradients_of,
    lines_of,
    product,
    profile_entries,
    profile_values,
)


@triton.jit
def drop_kernel(t, z, up, drop, F: tl.constexpr):
    """What a row loses, in float32: the output, whose weights are rounded to half precision, knows it less well.

    Upstream's own drop is what d_lse has of it.
    """
    block, p = last_block_first(), own_place(t, z)
    begin = block * F.BM
    origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + begin, F)
    rows = rows_at(t, z, F, p, begin, origin)
    above = above_at(up, z, F, p, begin)
    lost = above.drop
    above = Above(above.d, above.lse, tl.zeros_like(lost))
    seen = range_of(t, z, F, p, block)
    for tile in range(seen.begin // F.BN, tl.cdiv(seen.end, F.BN)):
        k, v = key_vectors(z, F, p, tile * F.BN)
        keys = keys_at(t, z, F, p, tile * F.BN, origin)
        lost += tl.sum(gradients_of(k, v, above, t, z, F, p, rows, keys, True).scores, 1)
    tl.store(drop + p.bh * z.queries + rows.index, lost, mask=rows.index < z.queries)


class RowGradients(NamedTuple):
    """Where rows_kernel writes; None for what is not learned."""

    d_q: Tensor
    d_logit: Tensor | None
    d_slope: Tensor | None
    d_level: Tensor | None
    d_factor: Tensor | None
    d_line_slope: Tensor | None
    """(batch x head, block of rows, line): sums over a block, and under d_line_start."""
    d_line_start: Tensor | None
    d_mixes: Tensor | None


@triton.jit
def rows_kernel(t, z, up, to, F: tl.constexpr, LINES: tl.constexpr, PROFILES: tl.constexpr):
    """LINES and PROFILES are powers of 2 that hold as many."""
    block, p = last_block_first(), own_place(t, z)
    begin = block * F.BM
    origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + begin, F)
    rows = rows_at(t, z, F, p, begin, origin)
    above = above_at(up, z, F, p, begin)
    ends = tiles_of(t, z, F, p, block)
    dq, d_logit = tl.zeros([F.BM, F.D], tl.float32), tl.zeros([F.BM], tl.float32)
    d_slope, d_level = tl.zeros([F.BM], tl.float32), tl.zeros([F.BM], tl.float32)
    d_factor, d_mixes = tl.zeros([F.BM], tl.float32), tl.zeros([F.BM, PROFILES], tl.float32)
    d_line_slope, d_line_start = tl.zeros([LINES], tl.float32), tl.zeros([LINES], tl.float32)
    for PHASE in tl.static_range(3):
        for at in range(ends[PHASE] * F.BN, ends[PHASE + 1] * F.BN, F.BN):
            k, v = key_vectors(z, F, p, at, PHASE == 1)
            keys = keys_at(t, z, F, p, at, origin, PHASE == 1)
            g = gradients_of(k, v, above, t, z, F, p, rows, keys, PHASE != 1)
            dq += product(g.content.to(k.dtype), k, F)
            if F.LOGIT:
                d_logit += tl.sum(g.scores * g.before, 1)
            if F.LEVEL:
                difference = level_differences(rows, keys, F)
                d_slope -= tl.sum(g.bias * curve_of(difference, F), 1)
                d_level -= tl.sum(along_curve(g.bias, difference, F), 1)
            if F.LINE:
                x, curve, line = lines_of(t, z, F, p.h, rows, keys)
                d_factor += tl.sum(g.bias * tl.load(t.line_slope + line) * curve, 1)
                for number in range(F.LINES):
                    own = tl.where(line == (p.h * F.LINES).to(tl.int32) + number, g.bias, 0.0)
                    here = tl.arange(0, LINES) == number
                    d_line_slope += tl.where(here, tl.sum(tl.sum(own * x, 1), 0), 0.0)
                    d_line_start += tl.where(here, tl.sum(tl.sum(own, 1), 0), 0.0)
            if F.PROFILE == OF_QUERIES:
                entry, has_one = profile_entries(z, F, rows, keys)
                for profile in range(F.PROFILES):
                    own = tl.sum(g.bias * profile_values(t, z, F, p.h, entry, has_one, profile), 1)
                    d_mixes += tl.where((tl.arange(0, PROFILES) == profile)[None, :], own[:, None], 0.0)
    put_vectors(to.d_q + p.bh * z.queries * F.DIM, dq * z.plain_scale, rows.index, z.queries, F.DIM, F.D, F)
    at, inside = p.bh * z.queries + rows.index, rows.index < z.queries
    if F.LOGIT:
        tl.store(to.d_logit + at, d_logit * LN2, mask=inside)
    if F.LEVEL:
        tl.store(to.d_slope + at, d_slope, mask=inside)
        tl.store(to.d_level + at, d_level * rows.slope * LN2, mask=inside)
    if F.LINE:
        tl.store(to.d_factor + at, d_factor * LN2, mask=inside)
        number = tl.arange(0, LINES)
        sums = (p.bh * tl.cdiv(z.queries, F.BM) + block) * F.LINES + number
        tl.store(to.d_line_slope + sums, d_line_slope, mask=number < F.LINES)
        tl.store(to.d_line_start + sums, d_line_start, mask=number < F.LINES)
    if F.PROFILE == OF_QUERIES:
        put_vectors(to.d_mixes + p.bh * z.queries * F.PROFILES, d_mixes, rows.index, z.queries, F.PROFILES, PROFILES, F)


class KeyGradients(NamedTuple):
    """Where keys_kernel writes; None for what is not learned."""

    d_k: Tensor
    d_v: Tensor
    d_level: Tensor | None
    d_mixes: Tensor | None


@triton.jit
def row_blocks_of(t, z, F: tl.constexpr, p, begin, end, AT_ONCE: tl.constexpr):
    """Where three runs of blocks of rows begin that visit keys from begin to end, and where the last ends.

    In the middle one all rows see all of these keys; what does so is one run, or nothing is said of it.
    """
    blocks = tl.cdiv(z.queries, F.BM)
    first, last, all_first, all_last, count = blocks, 0, blocks, 0, 0
    for at in range(0, blocks, AT_ONCE):
        block = at + tl.arange(0, AT_ONCE)
        seen = range_of(t, z, F, p, block)
        some = (block < blocks) & (seen.begin < end) & (seen.end > begin)
        every = some & (seen.all_begin <= begin) & (seen.all_end >= end)
        first = tl.minimum(first, tl.min(tl.where(some, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some, block + 1, 0), 0))
        all_first = tl.minimum(all_first, tl.min(tl.where(every, block, blocks), 0))
        all_last = tl.maximum(all_last, tl.max(tl.where(every, block + 1, 0), 0))
        count += tl.sum(tl.where(every, 1, 0), 0)
    is_run = (count > 0) & (count == all_last - all_first)
    last = tl.maximum(last, first)
    return first, tl.where(is_run, all_first, first), tl.where(is_run, all_last, first), last


@triton.jit
def keys_kernel(t, z, up, to, F: tl.constexpr, PROFILES: tl.constexpr, AT_ONCE: tl.constexpr):
    b, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * F.BN
    k, v = key_vectors(z, F, place_of(t, z, b, kv_head * z.group), begin)
    dk, dv = tl.zeros([F.BN, F.D], tl.float32), tl.zeros([F.BN, F.DV], tl.float32)
    for member in range(z.group):
        p = place_of(t, z, b, kv_head * z.group + member)
        ends = row_blocks_of(t, z, F, p, begin, begin + F.BN, AT_ONCE)
        origin = level_at(t.key_level, t.key_rest, p.bh * z.keys + begin, F)
        keys = keys_at(t, z, F, p, begin, origin)
        d_level, d_mixes = tl.zeros([F.BN], tl.float32), tl.zeros([F.BN, PROFILES], tl.float32)
        for PHASE in tl.static_range(3):
            for at in range(ends[PHASE] * F.BM, ends[PHASE + 1] * F.BM, F.BM):
                rows = rows_at(t, z, F, p, at, origin)
                above = above_at(up, z, F, p, at)
                g = gradients_of(k, v, above, t, z, F, p, rows, keys, PHASE != 1)
                dv += product(tl.trans(g.weights.to(above.d.dtype)), above.d, F)
                dk += product(tl.trans(g.content.to(rows.q.dtype)), rows.q, F)
                if F.LEVEL:
                    difference = level_differences(rows, keys, F)
                    d_level += tl.sum(along_curve(g.bias * rows.slope[:, None], difference, F), 0)
                if F.PROFILE == OF_KEYS:
                    entry, has_one = profile_entries(z, F, rows, keys)
                    for profile in range(F.PROFILES):
                        own = tl.sum(g.bias * profile_values(t, z, F, p.h, entry, has_one, profile), 0)
                        d_mixes += tl.where((tl.arange(0, PROFILES) == profile)[None, :], own[:, None], 0.0)
        if F.LEVEL:
            tl.store(to.d_level + p.bh * z.keys + keys.index, d_level * LN2, mask=keys.index < z.keys)
        if F.PROFILE == OF_KEYS:
            put_vectors(to.d_mixes + p.bh * z.keys * F.PROFILES, d_mixes, keys.index, z.keys, F.PROFILES, PROFILES, F)
    bg, column = b * tl.num_programs(1) + kv_head, begin + tl.arange(0, F.BN)
    put_vectors(to.d_k + bg * z.keys * F.DIM, dk * z.plain_scale, column, z.keys, F.DIM, F.D, F)
    put_vectors(to.d_v + bg * z.keys * F.VALUE, dv, column, z.keys, F.VALUE, F.DV, F)
