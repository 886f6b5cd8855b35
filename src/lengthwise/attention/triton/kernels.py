"""The kernels: attention in tiles of rows and keys, forward and backward, in Triton.

forward_kernel    out and log-sum-exp; a program per block of rows, or per block of rows and share of the keys
drop_kernel       in half precision, what each row loses to all of its weights' gradients
rows_kernel       the gradients of q and of what belongs to a row
keys_kernel       those of k, v and of what belongs to a key; a program walks through all heads that share its keys
bands_kernel      that of a table whose distances follow the slots: a program per band of tiles along the diagonal. In
                  all of them the element (r, c) has the same distance: tiles are added as they are, diagonals once
bounds_kernel     which blocks of keys cannot matter to a block of rows, see bounds.py
entries_kernel    that of any table, curve or profile: a program per block of entries, slow and exact

Nothing is added atomically and every program has its own place to write, so gradients have the same bits in every run.
Every kind of bias is one branch in `bias_of` and one in each gradient that it has; all else is shared. Inside, scores
are in units of log 2. Precision does not fall with length: a level is two float32, itself and its rest, and enters as
its difference from one level of the program's own block.

Written for Triton's interpreter and its compiler alike: plain pointers, no autotuning, every product "ieee".
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
ROOM = tl.constexpr(256)
"""More than any block: a strip has so many entries at both ends that no tile needs a clamp."""

STRIP, GATHERED = 1, 2
"""How a table is read: by the slots, or by the positions that it holds."""
LINEAR, LOGARITHMIC = 1, 2
"""Curves of levels."""
OF_QUERIES, OF_KEYS = 1, 2
"""Whose vectors meet the profiles."""
INTERPRETED, NVIDIA, OTHER = 0, 1, 2
"""What runs a kernel."""


class Flags(NamedTuple):
    """What a kernel is compiled for."""

    TABLE: int
    LEVEL: int
    LINE: int
    PROFILE: int
    ZERO: bool
    """Whether profiles are 0 beyond their ends."""
    LOGIT: bool
    CAP: bool
    SINK: bool
    DOCUMENTS: bool
    PADDING: bool
    BANDS: int
    DIM: int
    """The width of queries and keys."""
    VALUE: int
    D: int
    """The power of 2 that holds DIM, and under DV that of VALUE: narrower ones are filled up with zeros."""
    DV: int
    LINES: int
    PROFILES: int
    BM: int
    BN: int
    BE: int
    """So many entries of a table has a program of entries_kernel."""
    HOW: int
    SKIP: bool
    """Whether blocks of rows begin at keys of their own, `first`."""


class Given(NamedTuple):
    """What kernels read; None for what a call does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    """The least row - column that order and window let see, and how many numbers from it on."""
    ranges: Tensor
    """(batch or 1, block of rows, 4): keys that some row sees, from and to; that all rows see, from and to."""
    query_documents: Tensor | None
    key_documents: Tensor | None
    key_mask: Tensor | None
    band_low: Tensor | None
    """(band, batch, query): keys of a band have numbers above it, and at most those of `band_high`."""
    band_high: Tensor | None
    band_key: Tensor | None
    logit_scale: Tensor | None
    sink: Tensor | None
    table: Tensor | None
    table_query: Tensor | None
    table_key: Tensor | None
    query_level: Tensor | None
    query_rest: Tensor | None
    key_level: Tensor | None
    key_rest: Tensor | None
    slope: Tensor | None
    curve: Tensor | None
    curve_query: Tensor | None
    curve_key: Tensor | None
    factor: Tensor | None
    knots: Tensor | None
    line_slope: Tensor | None
    line_start: Tensor | None
    mixes: Tensor | None
    """The vectors that meet the profiles, (batch, head, token, profile)."""
    profiles: Tensor | None
    profile_query: Tensor | None
    profile_key: Tensor | None
    first: Tensor | None
    """(batch, head, block of rows): the first key that has to be visited."""


class Sizes(NamedTuple):
    """Plain numbers; strides are in elements, and the last axis lies close."""

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    row_blocks: int
    key_blocks: int
    range_batches: int
    strip_batch: int
    """From one sequence's strip to the next; 0 if they share one."""
    strip_length: int
    table_length: int
    table_first: int
    curve_length: int
    curve_first: int
    profile_length: int
    profile_first: int
    scale: float
    """In units of log 2 where there is no cap, else of the cap."""
    cap: float
    plain_scale: float
    """That of a product of a query and a key, whatever follows."""
    q_batch: int
    q_head: int
    q_row: int
    k_batch: int
    k_head: int
    k_row: int
    v_batch: int
    v_head: int
    v_row: int


class Upstream(NamedTuple):
    """What the backward pass is given beside: gradients, in float32 but for the output's, and what forward left."""

    d_out: Tensor
    lse: Tensor
    """In units of log 2; inf for rows that have no weight to give."""
    drop: Tensor
    """d_out . out - d_lse"""


@triton.jit
def product(a, b, F: tl.constexpr):
    """a b in float32. The interpreter multiplies the bits of bfloat16 as integers, so there both are widened first."""
    if F.HOW == 0:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def vectors(
    x, begin, count, stride, DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr = False
):
    """SIZE rows of a matrix from `begin` on; zeros outside, where WHOLE does not promise that there are none."""
    row, channel = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    # What is the same in every tile stands apart, and is computed once.
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
def put_vectors(x, values, at, count, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `at` of a matrix that lies close."""
    channel = tl.arange(0, WIDTH)
    inside = (at < count)[:, None] & (channel < DIM)[None, :]
    tl.store(x + at[:, None] * DIM + channel[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def numbers(x, at, count, WHOLE: tl.constexpr = False):
    """Some numbers of a row; 0 outside, where WHOLE does not promise that there are none."""
    if WHOLE:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=(at >= 0) & (at < count), other=0)


@triton.jit
def tanh(x):
    """To float32's precision; there is none that the interpreter and all targets have."""
    size = tl.abs(x)
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    small = tl.exp2(size * (-2 * LOG2E))
    large = (1 - small) / (1 + small)
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -large, large))


@triton.jit
def log1p(x):
    """log(1 + x) of x >= 0, with what 1 + x rounds away put back."""
    one_more = 1 + x
    return tl.log2(one_more) * LN2 + (x - (one_more - 1)) / one_more


@triton.jit
def reference_level(level, rest, F: tl.constexpr, at):
    """One level of a program's own block, from which all others are counted."""
    if F.LEVEL:
        return tl.load(level + at), tl.load(rest + at)
    else:
        return 0.0, 0.0


class RowSide(NamedTuple):
    """What the rows of a tile bring; 0 for what a call does not have. Positions are less a table's first distance."""

    level: Any
    slope: Any
    logit: Any
    factor: Any
    in_table: Any
    in_curve: Any
    in_profile: Any


class KeySide(NamedTuple):
    """What the keys of a tile bring."""

    level: Any
    in_table: Any
    in_curve: Any
    in_profile: Any


@triton.jit
def row_side(t, z, F: tl.constexpr, b, h, row, ref_high, ref_low):
    bh = b * z.heads + h
    level, slope, logit, factor, in_table, in_curve, in_profile = 0.0, 0.0, 0.0, 0.0, 0, 0, 0
    if F.LEVEL:
        level = numbers(t.query_level + bh * z.queries, row, z.queries) - ref_high
        level += numbers(t.query_rest + bh * z.queries, row, z.queries) - ref_low
        slope = numbers(t.slope + bh * z.queries, row, z.queries)
    if F.LOGIT:
        logit = numbers(t.logit_scale + bh * z.queries, row, z.queries)
    if F.LINE:
        factor = numbers(t.factor + b * z.queries, row, z.queries)
        in_curve = numbers(t.curve_query + b * z.queries, row, z.queries) - z.curve_first
    if F.TABLE == 2:
        in_table = numbers(t.table_query + b * z.queries, row, z.queries) - z.table_first
    if F.PROFILE:
        in_profile = numbers(t.profile_query + b * z.queries, row, z.queries) - z.profile_first
    return RowSide(level, slope, logit, factor, in_table, in_curve, in_profile)


@triton.jit
def key_side(t, z, F: tl.constexpr, b, h, column, ref_high, ref_low, WHOLE: tl.constexpr = False):
    bh = b * z.heads + h
    level, in_table, in_curve, in_profile = 0.0, 0, 0, 0
    if F.LEVEL:
        level = numbers(t.key_level + bh * z.keys, column, z.keys, WHOLE) - ref_high
        level += numbers(t.key_rest + bh * z.keys, column, z.keys, WHOLE) - ref_low
    if F.LINE:
        in_curve = numbers(t.curve_key + b * z.keys, column, z.keys, WHOLE)
    if F.TABLE == 2:
        in_table = numbers(t.table_key + b * z.keys, column, z.keys, WHOLE)
    if F.PROFILE:
        in_profile = numbers(t.profile_key + b * z.keys, column, z.keys, WHOLE)
    return KeySide(level, in_table, in_curve, in_profile)


@triton.jit
def clamped(query, key, length):
    """The entry of a table that each pair of a tile has."""
    return tl.minimum(tl.maximum(query[:, None] - key[None, :], 0), length - 1)


@triton.jit
def lines_of(t, z, F: tl.constexpr, h, R, C):
    """The number that lines are of, the curve that it is made of, and which line holds, for every pair of a tile."""
    entry = clamped(R.in_curve, C.in_curve, z.curve_length)
    curve = tl.load(t.curve + entry)
    x = R.factor[:, None] * curve
    line = tl.zeros_like(entry)
    for knot in range(F.LINES - 1):
        line += tl.where(x >= tl.load(t.knots + knot), 1, 0)
    return x, curve, line + (h * F.LINES).to(tl.int32)


@triton.jit
def profile_entries(z, F: tl.constexpr, R, C):
    """The entry of the profiles that each pair has, and whether it has one."""
    inside = clamped(R.in_profile, C.in_profile, z.profile_length)
    if F.ZERO:
        return inside, inside == R.in_profile[:, None] - C.in_profile[None, :]
    else:
        return inside, inside >= 0


@triton.jit
def mixed(t, z, F: tl.constexpr, b, h, row, column, profile):
    """What one profile is multiplied by, along the rows or along the columns of a tile."""
    if F.PROFILE == 1:
        at = ((b * z.heads + h) * z.queries + row) * F.PROFILES + profile
        return tl.load(t.mixes + at, mask=row < z.queries, other=0.0)[:, None]
    else:
        at = ((b * z.heads + h) * z.keys + column) * F.PROFILES + profile
        return tl.load(t.mixes + at, mask=(column >= 0) & (column < z.keys), other=0.0)[None, :]


@triton.jit
def profile_values(t, z, F: tl.constexpr, h, entry, has_one, profile):
    """One profile at every entry of a tile."""
    return tl.load(t.profiles + (h * F.PROFILES + profile) * z.profile_length + entry, mask=has_one, other=0.0)


@triton.jit
def bias_of(s, t, z, F: tl.constexpr, b, h, row, column, apart, R, C):
    """Scores with the bias added."""
    if F.TABLE == 1:
        # From the entry of the tile's corner on, in 64 bits: then what is between a thread's reads is known to the
        # compiler, and costs nothing.
        corner = t.table + b * z.strip_batch + h * z.strip_length + (ROOM + z.keys - 1 + apart)
        where = (corner + tl.arange(0, F.BM).to(tl.int64))[:, None] - tl.arange(0, F.BN).to(tl.int64)[None, :]
        if F.HOW == 1:
            # tl.load would be pipelined through shared memory, all of the tile; this stays in registers, and equal
            # distances of a thread are read once.
            s += tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [where], tl.float32, True, 1)
        else:
            s += tl.load(where)
    if F.TABLE == 2:
        s += tl.load(t.table + h * z.table_length + clamped(R.in_table, C.in_table, z.table_length))
    if F.LEVEL:
        difference = R.level[:, None] - C.level[None, :]
        if F.LEVEL == 2:
            s -= R.slope[:, None] * log1p(difference * difference)
        else:
            s -= R.slope[:, None] * tl.abs(difference)
    if F.LINE:
        x, curve, line = lines_of(t, z, F, h, R, C)
        s += tl.load(t.line_slope + line) * x + tl.load(t.line_start + line)
    if F.PROFILE:
        entry, has_one = profile_entries(z, F, R, C)
        for profile in range(F.PROFILES):
            s += mixed(t, z, F, b, h, row, column, profile) * profile_values(t, z, F, h, entry, has_one, profile)
    return s


@triton.jit
def visible(t, z, F: tl.constexpr, b, row, column):
    """Which keys of a tile each row may see; what it reads takes no register in tiles that all rows see whole."""
    nearest, count = tl.load(t.bounds), tl.load(t.bounds + 1)
    # Unsigned, a key that comes too late is further behind than any: one comparison.
    seen = (row[:, None] - column[None, :] - nearest).to(tl.uint32) < count.to(tl.uint32)
    seen = seen & ((column >= 0) & (column < z.keys))[None, :]
    if F.DOCUMENTS:
        own, other = t.query_documents + b * z.queries, t.key_documents + b * z.keys
        seen = seen & (numbers(own, row, z.queries)[:, None] == numbers(other, column, z.keys)[None, :])
    if F.PADDING:
        seen = seen & (numbers(t.key_mask + b * z.keys, column, z.keys) != 0)[None, :]
    if F.BANDS:
        inside = seen & (column < 0)[None, :]
        for band in tl.static_range(F.BANDS):
            of_query, of_key = (band * z.batch + b) * z.queries, (band * z.batch + b) * z.keys
            number = numbers(t.band_key + of_key, column, z.keys)[None, :]
            above = number > numbers(t.band_low + of_query, row, z.queries)[:, None]
            inside = inside | (above & (number <= numbers(t.band_high + of_query, row, z.queries)[:, None]))
        seen = seen & inside
    return seen


@triton.jit
def scores_of(q, k, t, z, F: tl.constexpr, b, h, row, column, apart, R, C, MASK: tl.constexpr):
    """Scores of a tile; what they are before the logit scale; and the slope of the cap.

    `apart` is the first row less the first column.
    """
    content = product(q, tl.trans(k), F) * z.scale
    cap_slope = content
    if F.CAP:
        capped = tanh(content)
        content, cap_slope = z.cap * capped, 1 - capped * capped
    before = bias_of(content, t, z, F, b, h, row, column, apart, R, C)
    s = before
    if F.LOGIT:
        s = before * R.logit[:, None]
    if MASK:
        s = tl.where(visible(t, z, F, b, row, column), s, float("-inf"))
    return s, before, cap_slope


@triton.jit
def d_scores_of(q, k, v, d, lse, drop, t, z, F: tl.constexpr, b, h, row, column, apart, R, C, MASK: tl.constexpr):
    """Weights; the gradients of the content, of the bias and of the scores; and scores before the logit scale."""
    s, before, cap_slope = scores_of(q, k, t, z, F, b, h, row, column, apart, R, C, MASK)
    p = tl.exp2(s - lse[:, None])
    d_scores = p * (product(d, tl.trans(v), F) - drop[:, None])
    d_bias = d_scores
    if F.LOGIT:
        d_bias = d_scores * R.logit[:, None]
    d_content = d_bias
    if F.CAP:
        d_content = d_bias * cap_slope
    return p, d_content, d_bias, d_scores, before


@triton.jit
def along_curve(d, difference, F: tl.constexpr):
    """A gradient times the derivative of a level's curve."""
    if F.LEVEL == 2:
        return d * 2 * difference / (1 + difference * difference)
    else:
        return tl.where(difference > 0, d, tl.where(difference < 0, -d, 0.0))


@triton.jit
def range_of(t, z, F: tl.constexpr, b, h, block):
    """Keys that some row of a block has to visit, from and to, and that all see."""
    at = t.ranges + ((b % z.range_batches) * z.row_blocks + block) * 4
    begin = tl.load(at)
    if F.SKIP:
        begin = tl.maximum(begin, tl.load(t.first + (b * z.heads + h) * z.row_blocks + block))
    return begin, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def forward_kernel(t, z, out, lse, F: tl.constexpr):
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    share, shares = tl.program_id(2), tl.num_programs(2)
    b, h = bh // z.heads, bh % z.heads
    row = block * F.BM + tl.arange(0, F.BM)
    q = vectors(t.q + b * z.q_batch + h * z.q_head, block * F.BM, z.queries, z.q_row, F.DIM, F.D, F.BM)
    k_base = t.k + b * z.k_batch + (h // z.group) * z.k_head
    v_base = t.v + b * z.v_batch + (h // z.group) * z.v_head
    ref_high, ref_low = reference_level(t.query_level, t.query_rest, F, bh * z.queries + block * F.BM)
    R = row_side(t, z, F, b, h, row, ref_high, ref_low)
    begin, end, all_begin, all_end = range_of(t, z, F, b, h, block)
    # In whole tiles, and this program's share of them.
    first = begin // F.BN
    count = tl.maximum(tl.cdiv(end, F.BN) - first, 0)
    from_tile, to_tile = first + count * share // shares, first + count * (share + 1) // shares
    all_from = tl.minimum(tl.maximum(tl.cdiv(all_begin, F.BN), from_tile), to_tile)
    all_to = tl.minimum(tl.maximum(all_end // F.BN, all_from), to_tile)
    acc = tl.zeros([F.BM, F.DV], tl.float32)
    m, total = tl.full([F.BM], float("-inf"), tl.float32), tl.zeros([F.BM], tl.float32)
    for PHASE in tl.static_range(3):  # some rows see some keys, all see all, some see some
        low = from_tile if PHASE == 0 else (all_from if PHASE == 1 else all_to)
        high = all_from if PHASE == 0 else (all_to if PHASE == 1 else to_tile)
        for at in range(low * F.BN, high * F.BN, F.BN):
            column = at + tl.arange(0, F.BN)
            k = vectors(k_base, at, z.keys, z.k_row, F.DIM, F.D, F.BN, PHASE == 1)
            v = vectors(v_base, at, z.keys, z.v_row, F.VALUE, F.DV, F.BN, PHASE == 1)
            C = key_side(t, z, F, b, h, column, ref_high, ref_low, PHASE == 1)
            s, before, cap_slope = scores_of(q, k, t, z, F, b, h, row, column, block * F.BM - at, R, C, PHASE != 1)
            new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            p, shrink = tl.exp2(s - shift[:, None]), tl.exp2(m - shift)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + product(p.to(v.dtype), v, F)
            m = new
    if F.SINK:
        sink = numbers(t.sink + bh * z.queries, row, z.queries) * LOG2E
        sink = tl.where(share == 0, sink, float("-inf"))
        new = tl.maximum(m, sink)
        shift = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(m - shift)
        total = total * shrink + tl.exp2(sink - shift)
        acc = acc * shrink[:, None]
        m = new
    empty = total == 0
    at = share * tl.num_programs(1) + bh
    put_vectors(
        out + at * z.queries * F.VALUE, acc / tl.where(empty, 1.0, total)[:, None], row, z.queries, F.VALUE, F.DV
    )
    log_total = (m + tl.log2(tl.where(empty, 1.0, total))) * LN2
    tl.store(lse + at * z.queries + row, tl.where(empty, float("-inf"), log_total), mask=row < z.queries)


@triton.jit
def upstream_of(up, z, F: tl.constexpr, bh, begin):
    """d_out, log-sum-exp and drop of some rows; rows outside have no weight to give."""
    row = begin + tl.arange(0, F.BM)
    d = vectors(up.d_out + bh * z.queries * F.VALUE, begin, z.queries, F.VALUE, F.VALUE, F.DV, F.BM)
    lse = tl.load(up.lse + bh * z.queries + row, mask=row < z.queries, other=float("inf"))
    return d, lse, numbers(up.drop + bh * z.queries, row, z.queries)


@triton.jit
def drop_kernel(t, z, up, drop, F: tl.constexpr):
    """What a row loses, in float32: the output, whose weights are rounded to half precision, knows it less well."""
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // z.heads, bh % z.heads
    row = block * F.BM + tl.arange(0, F.BM)
    q = vectors(t.q + b * z.q_batch + h * z.q_head, block * F.BM, z.queries, z.q_row, F.DIM, F.D, F.BM)
    d, lse, lost = upstream_of(up, z, F, bh, block * F.BM)
    k_base = t.k + b * z.k_batch + (h // z.group) * z.k_head
    v_base = t.v + b * z.v_batch + (h // z.group) * z.v_head
    ref_high, ref_low = reference_level(t.query_level, t.query_rest, F, bh * z.queries + block * F.BM)
    R = row_side(t, z, F, b, h, row, ref_high, ref_low)
    begin, end, all_begin, all_end = range_of(t, z, F, b, h, block)
    for tile in range(begin // F.BN, tl.cdiv(end, F.BN)):
        column = tile * F.BN + tl.arange(0, F.BN)
        k = vectors(k_base, tile * F.BN, z.keys, z.k_row, F.DIM, F.D, F.BN)
        v = vectors(v_base, tile * F.BN, z.keys, z.v_row, F.VALUE, F.DV, F.BN)
        C = key_side(t, z, F, b, h, column, ref_high, ref_low)
        p, d_content, d_bias, d_scores, before = d_scores_of(
            q, k, v, d, lse, tl.zeros_like(lost), t, z, F, b, h, row, column, block * F.BM - tile * F.BN, R, C, True
        )
        lost += tl.sum(d_scores, 1)
    tl.store(drop + bh * z.queries + row, lost, mask=row < z.queries)


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
    block, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // z.heads, bh % z.heads
    row = block * F.BM + tl.arange(0, F.BM)
    q = vectors(t.q + b * z.q_batch + h * z.q_head, block * F.BM, z.queries, z.q_row, F.DIM, F.D, F.BM)
    d, lse, drop = upstream_of(up, z, F, bh, block * F.BM)
    k_base = t.k + b * z.k_batch + (h // z.group) * z.k_head
    v_base = t.v + b * z.v_batch + (h // z.group) * z.v_head
    ref_high, ref_low = reference_level(t.query_level, t.query_rest, F, bh * z.queries + block * F.BM)
    R = row_side(t, z, F, b, h, row, ref_high, ref_low)
    begin, end, all_begin, all_end = range_of(t, z, F, b, h, block)
    from_tile = begin // F.BN
    to_tile = tl.maximum(tl.cdiv(end, F.BN), from_tile)
    all_from = tl.minimum(tl.maximum(tl.cdiv(all_begin, F.BN), from_tile), to_tile)
    all_to = tl.minimum(tl.maximum(all_end // F.BN, all_from), to_tile)
    dq, d_logit = tl.zeros([F.BM, F.D], tl.float32), tl.zeros([F.BM], tl.float32)
    d_slope, d_level, d_factor = (
        tl.zeros([F.BM], tl.float32),
        tl.zeros([F.BM], tl.float32),
        tl.zeros([F.BM], tl.float32),
    )
    d_line_slope, d_line_start = tl.zeros([LINES], tl.float32), tl.zeros([LINES], tl.float32)
    d_mixes = tl.zeros([F.BM, PROFILES], tl.float32)
    for PHASE in tl.static_range(3):
        low = from_tile if PHASE == 0 else (all_from if PHASE == 1 else all_to)
        high = all_from if PHASE == 0 else (all_to if PHASE == 1 else to_tile)
        for at in range(low * F.BN, high * F.BN, F.BN):
            column = at + tl.arange(0, F.BN)
            k = vectors(k_base, at, z.keys, z.k_row, F.DIM, F.D, F.BN, PHASE == 1)
            v = vectors(v_base, at, z.keys, z.v_row, F.VALUE, F.DV, F.BN, PHASE == 1)
            C = key_side(t, z, F, b, h, column, ref_high, ref_low, PHASE == 1)
            p, d_content, d_bias, d_scores, before = d_scores_of(
                q, k, v, d, lse, drop, t, z, F, b, h, row, column, block * F.BM - at, R, C, PHASE != 1
            )
            dq += product(d_content.to(k.dtype), k, F)
            if F.LOGIT:
                d_logit += tl.sum(d_scores * before, 1)
            if F.LEVEL:
                difference = R.level[:, None] - C.level[None, :]
                if F.LEVEL == 2:
                    d_slope -= tl.sum(d_bias * log1p(difference * difference), 1)
                else:
                    d_slope -= tl.sum(d_bias * tl.abs(difference), 1)
                d_level -= tl.sum(along_curve(d_bias, difference, F), 1)
            if F.LINE:
                x, curve, line = lines_of(t, z, F, h, R, C)
                d_factor += tl.sum(d_bias * tl.load(t.line_slope + line) * curve, 1)
                for number in range(F.LINES):
                    own = tl.where(line == (h * F.LINES).to(tl.int32) + number, d_bias, 0.0)
                    here = tl.arange(0, LINES) == number
                    d_line_slope += tl.where(here, tl.sum(tl.sum(own * x, 1), 0), 0.0)
                    d_line_start += tl.where(here, tl.sum(tl.sum(own, 1), 0), 0.0)
            if F.PROFILE == 1:
                entry, has_one = profile_entries(z, F, R, C)
                for profile in range(F.PROFILES):
                    own = tl.sum(d_bias * profile_values(t, z, F, h, entry, has_one, profile), 1)
                    d_mixes += tl.where((tl.arange(0, PROFILES) == profile)[None, :], own[:, None], 0.0)
    put_vectors(to.d_q + bh * z.queries * F.DIM, dq * z.plain_scale, row, z.queries, F.DIM, F.D)
    at, inside = bh * z.queries + row, row < z.queries
    if F.LOGIT:
        tl.store(to.d_logit + at, d_logit * LN2, mask=inside)
    if F.LEVEL:
        tl.store(to.d_slope + at, d_slope, mask=inside)
        tl.store(to.d_level + at, d_level * R.slope * LN2, mask=inside)
    if F.LINE:
        tl.store(to.d_factor + at, d_factor * LN2, mask=inside)
        number = tl.arange(0, LINES)
        sums = (bh * tl.num_programs(0) + block) * F.LINES + number
        tl.store(to.d_line_slope + sums, d_line_slope, mask=number < F.LINES)
        tl.store(to.d_line_start + sums, d_line_start, mask=number < F.LINES)
    if F.PROFILE == 1:
        put_vectors(to.d_mixes + bh * z.queries * F.PROFILES, d_mixes, row, z.queries, F.PROFILES, PROFILES)


class KeyGradients(NamedTuple):
    """Where keys_kernel writes; None for what is not learned."""

    d_k: Tensor
    d_v: Tensor
    d_level: Tensor | None
    d_mixes: Tensor | None


@triton.jit
def row_blocks_of(t, z, F: tl.constexpr, b, h, begin, end, AT_ONCE: tl.constexpr):
    """Blocks of rows of which some visit some keys from begin to end, from and to; and of which all see all of them.

    The latter are one run, or nothing is said of them.
    """
    first, last, all_first, all_last, count = z.row_blocks, 0, z.row_blocks, 0, 0
    for at in range(0, z.row_blocks, AT_ONCE):
        block = at + tl.arange(0, AT_ONCE)
        inside = block < z.row_blocks
        where = t.ranges + ((b % z.range_batches) * z.row_blocks + block) * 4
        visited = tl.load(where, mask=inside, other=0)
        if F.SKIP:
            own = t.first + (b * z.heads + h) * z.row_blocks + block
            visited = tl.maximum(visited, tl.load(own, mask=inside, other=0))
        some = inside & (visited < end) & (tl.load(where + 1, mask=inside, other=0) > begin)
        every = tl.load(where + 3, mask=inside, other=0) >= end
        every = some & every & (tl.load(where + 2, mask=inside, other=0) <= begin)
        first = tl.minimum(first, tl.min(tl.where(some, block, z.row_blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(some, block + 1, 0), 0))
        all_first = tl.minimum(all_first, tl.min(tl.where(every, block, z.row_blocks), 0))
        all_last = tl.maximum(all_last, tl.max(tl.where(every, block + 1, 0), 0))
        count += tl.sum(tl.where(every, 1, 0), 0)
    last = tl.maximum(last, first)
    is_run = (count > 0) & (count == all_last - all_first)
    return first, last, tl.where(is_run, all_first, first), tl.where(is_run, all_last, first)


@triton.jit
def keys_kernel(t, z, up, to, F: tl.constexpr, PROFILES: tl.constexpr, AT_ONCE: tl.constexpr):
    block, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_heads = z.heads // z.group
    b, g = bg // kv_heads, bg % kv_heads
    column = block * F.BN + tl.arange(0, F.BN)
    k = vectors(t.k + b * z.k_batch + g * z.k_head, block * F.BN, z.keys, z.k_row, F.DIM, F.D, F.BN)
    v = vectors(t.v + b * z.v_batch + g * z.v_head, block * F.BN, z.keys, z.v_row, F.VALUE, F.DV, F.BN)
    dk, dv = tl.zeros([F.BN, F.D], tl.float32), tl.zeros([F.BN, F.DV], tl.float32)
    begin = block * F.BN
    for member in range(z.group):
        h = g * z.group + member
        bh = b * z.heads + h
        first, last, all_first, all_last = row_blocks_of(t, z, F, b, h, begin, begin + F.BN, AT_ONCE)
        ref_high, ref_low = reference_level(t.key_level, t.key_rest, F, bh * z.keys + block * F.BN)
        C = key_side(t, z, F, b, h, column, ref_high, ref_low)
        d_level, d_mixes = tl.zeros([F.BN], tl.float32), tl.zeros([F.BN, PROFILES], tl.float32)
        for PHASE in tl.static_range(3):
            low = first if PHASE == 0 else (all_first if PHASE == 1 else all_last)
            high = all_first if PHASE == 0 else (all_last if PHASE == 1 else last)
            for at in range(low * F.BM, high * F.BM, F.BM):
                row = at + tl.arange(0, F.BM)
                q = vectors(t.q + b * z.q_batch + h * z.q_head, at, z.queries, z.q_row, F.DIM, F.D, F.BM)
                d, lse, drop = upstream_of(up, z, F, bh, at)
                R = row_side(t, z, F, b, h, row, ref_high, ref_low)
                p, d_content, d_bias, d_scores, before = d_scores_of(
                    q, k, v, d, lse, drop, t, z, F, b, h, row, column, at - block * F.BN, R, C, PHASE != 1
                )
                dv += product(tl.trans(p.to(d.dtype)), d, F)
                dk += product(tl.trans(d_content.to(q.dtype)), q, F)
                if F.LEVEL:
                    difference = R.level[:, None] - C.level[None, :]
                    d_level += tl.sum(along_curve(d_bias * R.slope[:, None], difference, F), 0)
                if F.PROFILE == 2:
                    entry, has_one = profile_entries(z, F, R, C)
                    for profile in range(F.PROFILES):
                        own = tl.sum(d_bias * profile_values(t, z, F, h, entry, has_one, profile), 0)
                        d_mixes += tl.where((tl.arange(0, PROFILES) == profile)[None, :], own[:, None], 0.0)
        if F.LEVEL:
            tl.store(to.d_level + bh * z.keys + column, d_level * LN2, mask=column < z.keys)
        if F.PROFILE == 2:
            put_vectors(to.d_mixes + bh * z.keys * F.PROFILES, d_mixes, column, z.keys, F.PROFILES, PROFILES)
    put_vectors(to.d_k + bg * z.keys * F.DIM, dk * z.plain_scale, column, z.keys, F.DIM, F.D)
    put_vectors(to.d_v + bg * z.keys * F.VALUE, dv, column, z.keys, F.VALUE, F.DV)


class Sides(NamedTuple):
    """What bounds_kernel knows of rows, (batch, head, query), and of blocks of keys; None for what a call has not."""

    q: Tensor
    """The length of the query, times the scale."""
    own: Tensor
    """The row's score on the key in its own slot."""
    own_k: Tensor
    """The length of that key, and under own_v of its value."""
    own_v: Tensor
    factor: Tensor | None
    """The logit scale; NaN where it is not positive."""
    longest_k: Tensor
    """(batch, kv_head, block): the longest key, and under longest_v the longest value."""
    longest_v: Tensor
    counts: Tensor
    """(batch, block): how many keys are no padding."""
    highest: Tensor | None
    """For every entry of the strip, the largest at its distance or beyond."""
    top: Tensor | None
    """(batch, head, block): the highest level, and under top_rest its rest."""
    top_rest: Tensor | None
    lse: Tensor | None
    above: Tensor | None
    """The length of d_out."""
    delta: Tensor | None
    row: Tensor | None
    """What the row's own key contributes to its gradient."""


@triton.jit
def at_least_1(x):
    """Unlike tl.maximum it leaves NaN as it is."""
    return tl.where(x < 1, 1.0, x)


@triton.jit
def bounds_kernel(
    t, z, s, good, of_keys, count, width, small, F: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr
):
    """For a block of rows and every block of keys: 1 if no row misses it and those before; and what the keys lose."""
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // z.heads, bh % z.heads
    row = block * ROWS + tl.arange(0, ROWS)
    inside, mine = row < z.queries, bh * z.queries
    q, own = numbers(s.q + mine, row, z.queries), numbers(s.own + mine, row, z.queries)
    own_k, own_v = numbers(s.own_k + mine, row, z.queries), numbers(s.own_v + mine, row, z.queries)
    level, rest, slope, factor, lse, above, delta, of_row = 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0
    if F.LEVEL:
        level, rest = numbers(t.query_level + mine, row, z.queries), numbers(t.query_rest + mine, row, z.queries)
        slope = numbers(t.slope + mine, row, z.queries)
    if F.LOGIT:
        factor = numbers(s.factor + mine, row, z.queries)
    if BACKWARD:
        lse, above = numbers(s.lse + mine, row, z.queries), numbers(s.above + mine, row, z.queries)
        delta, of_row = numbers(s.delta + mine, row, z.queries), numbers(s.row + mine, row, z.queries)
    of_head = (b * (z.heads // z.group) + h // z.group) * count
    here = (bh * tl.num_programs(0) + block) * count
    part = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * count
    lost = tl.zeros([ROWS], tl.float32)
    for n in range(count):
        longest_k, longest_v = tl.load(s.longest_k + of_head + n), tl.load(s.longest_v + of_head + n)
        keys = tl.load(s.counts + b * count + n)
        ceiling = tl.zeros([ROWS], tl.float32)
        if F.TABLE:
            strip = s.highest + b * z.strip_batch + h * z.strip_length + ROOM
            ceiling += tl.load(strip + (row + (z.keys - 1) - (n * width + width - 1)), mask=inside, other=0.0)
        if F.LEVEL:
            rise = (level - tl.load(s.top + bh * count + n)) + (rest - tl.load(s.top_rest + bh * count + n))
            rise = tl.where(rise < 0, 0.0, rise)
            ceiling += tl.where(slope >= 0, -slope * rise, float("inf"))
        content = q * longest_k
        upper = ceiling + content
        if F.LOGIT:
            upper = upper * factor
        if BACKWARD:
            share = tl.exp2(upper - lse)
            weighed = share * (above * longest_v + delta)
            # The gradient of a slope or a logit scale is larger the larger a score is.
            size = tl.where(ceiling > 0, 0.0, -ceiling)
            if F.LOGIT:
                size += content
            lost += weighed * keys * at_least_1(longest_k / own_k) * (1 + size)
            fits = (lost / of_row <= small) | ((above == 0) & (delta == 0))
            steep = 1.0
            if F.LEVEL:
                steep = slope
            tl.store(of_keys + here + n, tl.sum(tl.where(inside, share * above, 0.0), 0))
            tl.store(of_keys + part + here + n, tl.sum(tl.where(inside, weighed * q * factor, 0.0), 0))
            tl.store(of_keys + 2 * part + here + n, tl.sum(tl.where(inside, weighed * steep * factor, 0.0), 0))
        else:
            lost += tl.exp2(upper - own) * keys * at_least_1(longest_v / own_v)
            fits = lost <= small
        misses = tl.sum(tl.where(inside & (fits == 0), 1, 0), 0)
        tl.store(good + here + n, (misses == 0).to(tl.int8))


@triton.jit
def bands_kernel(t, z, up, sums, low_band, F: tl.constexpr):
    """Sums of the bias's gradient along the diagonals of one band of tiles: row - column = band BM + r - c."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // z.heads, bh % z.heads
    band = low_band + tl.program_id(0)
    r = tl.arange(0, F.BM)
    k_base = t.k + b * z.k_batch + (h // z.group) * z.k_head
    v_base = t.v + b * z.v_batch + (h // z.group) * z.v_head
    total = tl.zeros([F.BM, F.BM], tl.float32)
    for block in range(tl.maximum(band, 0), tl.minimum(z.row_blocks, z.key_blocks + band)):
        row = block * F.BM + r
        column = row - band * F.BM
        begin, end, all_begin, all_end = range_of(t, z, F, b, h, block)
        at = (block - band) * F.BM
        if (at < end) & (at + F.BM > begin):
            q = vectors(t.q + b * z.q_batch + h * z.q_head, block * F.BM, z.queries, z.q_row, F.DIM, F.D, F.BM)
            d, lse, drop = upstream_of(up, z, F, bh, block * F.BM)
            k = vectors(k_base, at, z.keys, z.k_row, F.DIM, F.D, F.BN)
            v = vectors(v_base, at, z.keys, z.v_row, F.VALUE, F.DV, F.BN)
            ref_high, ref_low = reference_level(t.query_level, t.query_rest, F, bh * z.queries + block * F.BM)
            R = row_side(t, z, F, b, h, row, ref_high, ref_low)
            C = key_side(t, z, F, b, h, column, ref_high, ref_low)
            p, d_content, d_bias, d_scores, before = d_scores_of(
                q, k, v, d, lse, drop, t, z, F, b, h, row, column, band * F.BM, R, C, True
            )
            total += d_bias
    # Row r turned by r: then column c holds row - column = band BM + c where c <= r, and BM less elsewhere.
    turned = tl.gather(total, (r[:, None] - r[None, :] + F.BM) % F.BM, 1)
    near = r[None, :] <= r[:, None]
    sums += (bh * tl.num_programs(0) + tl.program_id(0)) * 2 * F.BM + r
    tl.store(sums, tl.sum(tl.where(near, turned, 0.0), 0))
    tl.store(sums + F.BM, tl.sum(tl.where(near, 0.0, turned), 0))


@triton.jit
def entries_kernel(t, z, up, to, length, F: tl.constexpr, WHICH: tl.constexpr, PROFILES: tl.constexpr):
    """The gradient of some entries of a table (WHICH 0), a curve (1) or of profiles (2), of one sequence and head."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // z.heads, bh % z.heads
    begin_entry = tl.program_id(0) * F.BE
    own_entry = tl.arange(0, F.BE)
    k_base = t.k + b * z.k_batch + (h // z.group) * z.k_head
    v_base = t.v + b * z.v_batch + (h // z.group) * z.v_head
    total = tl.zeros([PROFILES, F.BE], tl.float32)
    for block in range(z.row_blocks):
        row = block * F.BM + tl.arange(0, F.BM)
        q = vectors(t.q + b * z.q_batch + h * z.q_head, block * F.BM, z.queries, z.q_row, F.DIM, F.D, F.BM)
        d, lse, drop = upstream_of(up, z, F, bh, block * F.BM)
        ref_high, ref_low = reference_level(t.query_level, t.query_rest, F, bh * z.queries + block * F.BM)
        R = row_side(t, z, F, b, h, row, ref_high, ref_low)
        some_begin, some_end, all_begin, all_end = range_of(t, z, F, b, h, block)
        for tile in range(some_begin // F.BN, tl.cdiv(some_end, F.BN)):
            column = tile * F.BN + tl.arange(0, F.BN)
            C = key_side(t, z, F, b, h, column, ref_high, ref_low)
            if WHICH == 0:
                entry = clamped(R.in_table, C.in_table, length)
            elif WHICH == 1:
                entry = clamped(R.in_curve, C.in_curve, length)
            else:
                entry, has_one = profile_entries(z, F, R, C)
                entry = tl.where(has_one, entry, -1)
            own = (entry >= begin_entry) & (entry < begin_entry + F.BE)
            if tl.max(tl.max(tl.where(own, 1, 0), 1), 0) > 0:
                k = vectors(k_base, tile * F.BN, z.keys, z.k_row, F.DIM, F.D, F.BN)
                v = vectors(v_base, tile * F.BN, z.keys, z.v_row, F.VALUE, F.DV, F.BN)
                p, d_content, d_entry, d_scores, before = d_scores_of(
                    q, k, v, d, lse, drop, t, z, F, b, h, row, column, block * F.BM - tile * F.BN, R, C, True
                )
                if WHICH == 1:
                    x, curve, line = lines_of(t, z, F, h, R, C)
                    d_entry = d_entry * tl.load(t.line_slope + line) * R.factor[:, None]
                for number in range(F.BE):
                    here = (own_entry == number)[None, :]
                    picked = tl.where(entry == begin_entry + number, d_entry, 0.0)
                    if WHICH == 2:
                        if F.PROFILE == 1:
                            base = t.mixes + bh * z.queries * F.PROFILES
                            mixes = vectors(base, block * F.BM, z.queries, F.PROFILES, F.PROFILES, PROFILES, F.BM)
                            sums = tl.sum(mixes * tl.sum(picked, 1)[:, None], 0)
                        else:
                            base = t.mixes + bh * z.keys * F.PROFILES
                            mixes = vectors(base, tile * F.BN, z.keys, F.PROFILES, F.PROFILES, PROFILES, F.BN)
                            sums = tl.sum(mixes * tl.sum(picked, 0)[:, None], 0)
                        total += tl.where(here, sums[:, None], 0.0)
                    else:
                        total += tl.where(here, tl.sum(tl.sum(picked, 1), 0), 0.0)
    entry = begin_entry + own_entry
    if WHICH == 2:
        number = tl.arange(0, PROFILES)
        where = (bh * F.PROFILES + number)[:, None] * length + entry[None, :]
        tl.store(to + where, total * LN2, mask=(number < F.PROFILES)[:, None] & (entry < length)[None, :])
    else:
        sums = tl.sum(total, 0)  # of one row
        tl.store(to + bh * length + entry, sums * LN2 if WHICH == 1 else sums, mask=entry < length)
