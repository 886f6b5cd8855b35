"""The scores of a tile, with every kind of bias and mask, and their gradients."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lengthwise.attention.triton.kernels.arguments import (
    GATHERED,
    INTERPRETED,
    LN2,
    LOG2E,
    LOGARITHMIC,
    NVIDIA,
    OF_QUERIES,
    ROOM,
    STRIP,
)
from lengthwise.attention.triton.kernels.reading import level_differences, numbers


@triton.jit
def product(a, b, F: tl.constexpr):
    """a b in float32. The interpreter multiplies the bits of bfloat16 as integers, so there both are widened first."""
    if F.TARGET == INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


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
def curve_of(difference, F: tl.constexpr):
    """What a slope is multiplied by."""
    if F.LEVEL == LOGARITHMIC:
        return log1p(difference * difference)
    else:
        return tl.abs(difference)


@triton.jit
def along_curve(d, difference, F: tl.constexpr):
    """A gradient times the derivative of a level's curve."""
    if F.LEVEL == LOGARITHMIC:
        return d * 2 * difference / (1 + difference * difference)
    else:
        return tl.where(difference > 0, d, tl.where(difference < 0, -d, 0.0))


@triton.jit
def clamped(query, key, length):
    """The entry of a table that each pair of a tile has."""
    return tl.minimum(tl.maximum(query[:, None] - key[None, :], 0), length - 1)


@triton.jit
def lines_of(t, z, F: tl.constexpr, h, rows, keys):
    """The number that lines are of, the curve that it is made of, and which line holds, for every pair of a tile."""
    entry = clamped(rows.in_curve, keys.in_curve, z.curve_length)
    curve = tl.load(t.curve + entry)
    x = rows.factor[:, None] * curve
    line = tl.zeros_like(entry)
    for knot in range(F.LINES - 1):
        line += tl.where(x >= tl.load(t.knots + knot), 1, 0)
    return x, curve, line + (h * F.LINES).to(tl.int32)


@triton.jit
def profile_entries(z, F: tl.constexpr, rows, keys):
    """The entry of the profiles that each pair has, and whether it has one."""
    inside = clamped(rows.in_profile, keys.in_profile, z.profile_length)
    if F.ZERO:
        return inside, inside == rows.in_profile[:, None] - keys.in_profile[None, :]
    else:
        return inside, inside >= 0


@triton.jit
def mixed(t, z, F: tl.constexpr, p, rows, keys, profile):
    """What one profile is multiplied by, along the rows or along the columns of a tile."""
    if F.PROFILE == OF_QUERIES:
        at = (p.bh * z.queries + rows.index) * F.PROFILES + profile
        return tl.load(t.mixes + at, mask=rows.index < z.queries, other=0.0)[:, None]
    else:
        at = (p.bh * z.keys + keys.index) * F.PROFILES + profile
        return tl.load(t.mixes + at, mask=(keys.index >= 0) & (keys.index < z.keys), other=0.0)[None, :]


@triton.jit
def profile_values(t, z, F: tl.constexpr, h, entry, has_one, profile):
    """One profile at every entry of a tile."""
    return tl.load(t.profiles + (h * F.PROFILES + profile) * z.profile_length + entry, mask=has_one, other=0.0)


@triton.jit
def bias_of(s, t, z, F: tl.constexpr, p, rows, keys):
    """Scores with the bias added."""
    if F.TABLE == STRIP:
        # From the entry of the tile's corner on, in 64 bits: then what is between a thread's reads is known to the
        # compiler, and costs nothing.
        corner = t.table + p.b * z.strip_batch + p.h * z.strip_length + (ROOM + z.keys - 1 + (rows.begin - keys.begin))
        where = (corner + tl.arange(0, F.BM).to(tl.int64))[:, None] - tl.arange(0, F.BN).to(tl.int64)[None, :]
        if F.TARGET == NVIDIA:
            # tl.load would be pipelined through shared memory, all of the tile; this stays in registers, and equal
            # distances of a thread are read once.
            s += tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [where], tl.float32, True, 1)
        else:
            s += tl.load(where)
    if F.TABLE == GATHERED:
        s += tl.load(t.table + p.h * z.table_length + clamped(rows.in_table, keys.in_table, z.table_length))
    if F.LEVEL:
        s -= rows.slope[:, None] * curve_of(level_differences(rows, keys, F), F)
    if F.LINE:
        x, curve, line = lines_of(t, z, F, p.h, rows, keys)
        s += tl.load(t.line_slope + line) * x + tl.load(t.line_start + line)
    if F.PROFILE:
        entry, has_one = profile_entries(z, F, rows, keys)
        for profile in range(F.PROFILES):
            s += mixed(t, z, F, p, rows, keys, profile) * profile_values(t, z, F, p.h, entry, has_one, profile)
    return s


@triton.jit
def visible(t, z, F: tl.constexpr, b, rows, keys):
    """Which keys of a tile each row may see; what it reads takes no register in tiles that all rows see whole."""
    row, column = rows.index, keys.index
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


class Scores(NamedTuple):
    """Scores of a tile; what they are before the logit scale; and the slope of the cap."""

    scores: Any
    before: Any
    cap_slope: Any


@triton.jit
def scores_of(k, t, z, F: tl.constexpr, p, rows, keys, MASK: tl.constexpr):
    content = product(rows.q, tl.trans(k), F) * z.scale
    cap_slope = content
    if F.CAP:
        capped = tanh(content)
        content, cap_slope = z.cap * capped, 1 - capped * capped
    before = bias_of(content, t, z, F, p, rows, keys)
    s = before
    if F.LOGIT:
        s = before * rows.logit[:, None]
    if MASK:
        s = tl.where(visible(t, z, F, p.b, rows, keys), s, float("-inf"))
    return Scores(s, before, cap_slope)


class Gradients(NamedTuple):
    """Weights of a tile; the gradients of the content, of the bias and of the scores; scores before the logit scale."""

    weights: Any
    content: Any
    bias: Any
    scores: Any
    before: Any


@triton.jit
def gradients_of(k, v, above, t, z, F: tl.constexpr, p, rows, keys, MASK: tl.constexpr):
    s = scores_of(k, t, z, F, p, rows, keys, MASK)
    weights = tl.exp2(s.scores - above.lse[:, None])
    d_scores = weights * (product(above.d, tl.trans(v), F) - above.drop[:, None])
    d_bias = d_scores
    if F.LOGIT:
        d_bias = d_scores * rows.logit[:, None]
    d_content = d_bias
    if F.CAP:
        d_content = d_bias * s.cap_slope
    return Gradients(weights, d_content, d_bias, d_scores, s.before)
