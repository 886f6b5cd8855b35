"""Which block a program has, and what it reads of rows and keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lengthwise.attention.triton.kernels.arguments import GATHERED


@triton.jit
def vectors(
    x,
    begin,
    count,
    stride,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    F: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """SIZE rows of a matrix from `begin` on; zeros outside, where WHOLE does not promise that there are none."""
    row, channel = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    # What is the same in every tile stands apart, and is computed once.
    if F.WIDE:
        where = x + tl.cast(begin, tl.int64) * stride + (row[:, None] * stride + channel[None, :])
    else:
        where = x + begin * stride + (row[:, None] * stride + channel[None, :])
    if WHOLE and DIM == WIDTH:
        return tl.load(where)
    else:
        at = begin + row
        inside = ((at >= 0) & (at < count))[:, None]
        if DIM != WIDTH:
            inside = inside & (channel < DIM)[None, :]
        return tl.load(where, mask=inside, other=0.0)


@triton.jit
def put_vectors(x, values, at, count, DIM: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr):
    """Rows `at` of a matrix that lies close."""
    channel = tl.arange(0, WIDTH)
    inside = (at < count)[:, None] & (channel < DIM)[None, :]
    if F.WIDE:
        at = at.to(tl.int64)
    tl.store(x + at[:, None] * DIM + channel[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def numbers(x, at, count, WHOLE: tl.constexpr = False, OUTSIDE: tl.constexpr = 0):
    """Some numbers of a row; OUTSIDE where there are none, if WHOLE does not promise that there are."""
    if WHOLE:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=(at >= 0) & (at < count), other=OUTSIDE)


class Place(NamedTuple):
    """A sequence and a head, by number and both as one, and where their queries, keys and values begin."""

    b: Any
    h: Any
    bh: Any
    q: Any
    k: Any
    v: Any


@triton.jit
def place_of(t, z, b, h):
    kv_head = h // z.group
    return Place(
        b,
        h,
        b * z.heads + h,
        t.q + b * z.q_batch + h * z.q_head,
        t.k + b * z.k_batch + kv_head * z.k_head,
        t.v + b * z.v_batch + kv_head * z.v_head,
    )


@triton.jit
def own_place(t, z):
    """That of this program: the second axis of every grid is heads, the third sequences, and the first its blocks."""
    return place_of(t, z, tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64))


@triton.jit
def last_block_first():
    """The block of rows that this program has: the last ones, which have most keys, begin."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


class Level(NamedTuple):
    """A level and its rest."""

    high: Any
    rest: Any


@triton.jit
def level_at(level, rest, at, F: tl.constexpr):
    """One level of a program's own block, from which all others are counted."""
    if F.LEVEL:
        return Level(tl.load(level + at), tl.load(rest + at))
    else:
        return Level(0.0, 0.0)


@triton.jit
def from_origin(high, rest, origin, F: tl.constexpr):
    """Levels less one of them; in float32 with what that rounds away, which is not little where a block spans much."""
    level = high - origin.high
    if F.FINE:
        change = level - high
        rest = (high - (level - change)) - (origin.high + change) + (rest - origin.rest)
        total = level + rest
        return Level(total, rest - (total - level))
    else:
        return Level(level + (rest - origin.rest), 0.0)


@triton.jit
def level_differences(rows, keys, F: tl.constexpr):
    """Of every pair of a tile."""
    difference = rows.level.high[:, None] - keys.level.high[None, :]
    if F.FINE:
        difference += rows.level.rest[:, None] - keys.level.rest[None, :]
    return difference


class Rows(NamedTuple):
    """The rows of a tile; 0 for what a call does not have. Positions are less a table's first distance."""

    begin: Any
    index: Any
    q: Any
    level: Any
    slope: Any
    logit: Any
    factor: Any
    in_table: Any
    in_curve: Any
    in_profile: Any


class Keys(NamedTuple):
    """The keys of a tile but for their vectors."""

    begin: Any
    index: Any
    level: Any
    in_table: Any
    in_curve: Any
    in_profile: Any


@triton.jit
def rows_at(t, z, F: tl.constexpr, p, begin, origin):
    """BM rows from `begin` on, their levels less `origin`."""
    row = begin + tl.arange(0, F.BM)
    slope, logit, factor, in_table, in_curve, in_profile = 0.0, 0.0, 0.0, 0, 0, 0
    level = origin
    if F.LEVEL:
        high = numbers(t.query_level + p.bh * z.queries, row, z.queries)
        level = from_origin(high, numbers(t.query_rest + p.bh * z.queries, row, z.queries), origin, F)
        slope = numbers(t.slope + p.bh * z.queries, row, z.queries)
    if F.LOGIT:
        # Not 0, which a bias of -inf would make no number of.
        logit = numbers(t.logit_scale + p.bh * z.queries, row, z.queries, OUTSIDE=1)
    if F.LINE:
        factor = numbers(t.factor + p.b * z.queries, row, z.queries)
        in_curve = numbers(t.curve_query + p.b * z.queries, row, z.queries) - z.curve_first
    if F.TABLE == GATHERED:
        in_table = numbers(t.table_query + p.b * z.queries, row, z.queries) - z.table_first
    if F.PROFILE:
        in_profile = numbers(t.profile_query + p.b * z.queries, row, z.queries) - z.profile_first
    q = vectors(p.q, begin, z.queries, z.q_row, F.DIM, F.D, F.BM, F)
    return Rows(begin, row, q, level, slope, logit, factor, in_table, in_curve, in_profile)


@triton.jit
def keys_at(t, z, F: tl.constexpr, p, begin, origin, WHOLE: tl.constexpr = False):
    """BN keys from `begin` on, their levels less `origin`."""
    column = begin + tl.arange(0, F.BN)
    in_table, in_curve, in_profile = 0, 0, 0
    level = origin
    if F.LEVEL:
        high = numbers(t.key_level + p.bh * z.keys, column, z.keys, WHOLE)
        level = from_origin(high, numbers(t.key_rest + p.bh * z.keys, column, z.keys, WHOLE), origin, F)
    if F.LINE:
        in_curve = numbers(t.curve_key + p.b * z.keys, column, z.keys, WHOLE)
    if F.TABLE == GATHERED:
        in_table = numbers(t.table_key + p.b * z.keys, column, z.keys, WHOLE)
    if F.PROFILE:
        in_profile = numbers(t.profile_key + p.b * z.keys, column, z.keys, WHOLE)
    return Keys(begin, column, level, in_table, in_curve, in_profile)


@triton.jit
def key_vectors(z, F: tl.constexpr, p, begin, WHOLE: tl.constexpr = False):
    """The vectors of BN keys and their values."""
    k = vectors(p.k, begin, z.keys, z.k_row, F.DIM, F.D, F.BN, F, WHOLE)
    return k, vectors(p.v, begin, z.keys, z.v_row, F.VALUE, F.DV, F.BN, F, WHOLE)


class Above(NamedTuple):
    """What some rows have of `Upstream`."""

    d: Any
    lse: Any
    drop: Any


@triton.jit
def above_at(up, z, F: tl.constexpr, p, begin):
    """That of BM rows from `begin` on; rows outside have no weight to give."""
    row = begin + tl.arange(0, F.BM)
    d = vectors(up.d_out + p.bh * z.queries * F.VALUE, begin, z.queries, F.VALUE, F.VALUE, F.DV, F.BM, F)
    lse = tl.load(up.lse + p.bh * z.queries + row, mask=row < z.queries, other=float("inf"))
    return Above(d, lse, numbers(up.drop + p.bh * z.queries, row, z.queries))


class Range(NamedTuple):
    """Keys that some row of a block sees, from and to; and that all see."""

    begin: Any
    end: Any
    all_begin: Any
    all_end: Any


@triton.jit
def range_of(t, z, F: tl.constexpr, p, block):
    """That of a block of rows, or of several."""
    blocks = tl.cdiv(z.queries, F.BM)
    if F.RANGES:
        at, inside = t.ranges + (p.b * blocks + block) * 4, block < blocks
        begin, end = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        all_begin, all_end = tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0)
    else:
        nearest, count = tl.load(t.bounds), tl.load(t.bounds + 1)
        of_first = block * F.BM - nearest
        of_last = tl.minimum(block * F.BM + F.BM, z.queries) - 1 - nearest
        begin, end = tl.maximum(of_first - count + 1, 0), tl.minimum(of_last + 1, z.keys)
        all_begin, all_end = tl.maximum(of_last - count + 1, 0), tl.minimum(of_first + 1, z.keys)
    if F.SKIP:
        begin = tl.maximum(begin, tl.load(t.first + p.bh * blocks + block, mask=block < blocks, other=0))
    return Range(begin, end, all_begin, all_end)


@triton.jit
def tiles_of(t, z, F: tl.constexpr, p, block, share=0, shares=1):
    """Where three runs of tiles begin, and where the last ends: some rows see some keys, all see all, some see some.

    Of all tiles that a block visits this is one of `shares` shares.
    """
    seen = range_of(t, z, F, p, block)
    first = seen.begin // F.BN
    count = tl.maximum(tl.cdiv(seen.end, F.BN) - first, 0)
    from_tile, to_tile = first + count * share // shares, first + count * (share + 1) // shares
    all_from = tl.minimum(tl.maximum(tl.cdiv(seen.all_begin, F.BN), from_tile), to_tile)
    return from_tile, all_from, tl.minimum(tl.maximum(seen.all_end // F.BN, all_from), to_tile), to_tile
