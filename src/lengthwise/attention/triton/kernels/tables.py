"""The gradients of tables, curves and profiles: what belongs to a distance."""

import triton
import triton.language as tl

from lengthwise.attention.triton.kernels.arguments import OF_QUERIES
from lengthwise.attention.triton.kernels.reading import (
    above_at,
    key_vectors,
    keys_at,
    level_at,
    own_place,
    range_of,
    rows_at,
)
from lengthwise.attention.triton.kernels.scores import clamped, gradients_of, lines_of, product, profile_entries


@triton.jit(do_not_specialize=["low_band"])
def bands_kernel(t, z, up, sums, low_band, F: tl.constexpr):
    """Sums of the bias's gradient along the diagonals of one band of tiles: row - column = band BM + r - c.

    In all tiles of a band the element (r, c) has the same distance: tiles are added as they are, diagonals once.
    """
    p = own_place(t, z)
    band = low_band + tl.program_id(0)
    r = tl.arange(0, F.BM)
    total = tl.zeros([F.BM, F.BM], tl.float32)
    first, last = tl.maximum(band, 0), tl.minimum(tl.cdiv(z.queries, F.BM), tl.cdiv(z.keys, F.BM) + band)
    for block in range(first, last):
        at = (block - band) * F.BM
        seen = range_of(t, z, F, p, block)
        if (at < seen.end) & (at + F.BM > seen.begin):
            origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + block * F.BM, F)
            rows = rows_at(t, z, F, p, block * F.BM, origin)
            above = above_at(up, z, F, p, block * F.BM)
            k, v = key_vectors(z, F, p, at)
            keys = keys_at(t, z, F, p, at, origin)
            total += gradients_of(k, v, above, t, z, F, p, rows, keys, True).bias
    # Row r turned by r: then column c holds row - column = band BM + c where c <= r, and BM less elsewhere.
    turned = tl.gather(total, (r[:, None] - r[None, :] + F.BM) % F.BM, 1)
    near = r[None, :] <= r[:, None]
    sums += (p.bh * tl.num_programs(0) + tl.program_id(0)) * 2 * F.BM + r
    tl.store(sums, tl.sum(tl.where(near, turned, 0.0), 0))
    tl.store(sums + F.BM, tl.sum(tl.where(near, 0.0, turned), 0))


@triton.jit
def sums_by_entry(values, entry, begin, low, high, F: tl.constexpr, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Of BE entries from `begin` on those from `low` to `high`: what each row (AXIS 1) or column (0) has of them."""
    own = begin + tl.arange(0, F.BE)
    sums = tl.zeros([SIZE, F.BE], tl.float32)
    for number in range(tl.maximum(low, begin), tl.minimum(high + 1, begin + F.BE)):
        picked = tl.sum(tl.where(entry == number, values, 0.0), AXIS)
        sums += tl.where((own == number)[None, :], picked[:, None], 0.0)
    return sums


@triton.jit(do_not_specialize=["length"])
def entries_kernel(t, z, up, to, length, F: tl.constexpr, WHICH: tl.constexpr):
    """The gradient of a table (WHICH 0), a curve (1) or of profiles (2), of some blocks of rows of a sequence and head.

    A program goes through its tiles once, and adds what a tile has to the entries between the least and the greatest
    that occur in it. Its sums lie in memory, where nobody else writes.
    """
    p = own_place(t, z)
    chunk = tl.program_id(0)
    part = chunk * (tl.num_programs(1) * tl.num_programs(2)) + p.bh
    for block in range(chunk, tl.cdiv(z.queries, F.BM), tl.num_programs(0)):
        origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + block * F.BM, F)
        rows = rows_at(t, z, F, p, block * F.BM, origin)
        above = above_at(up, z, F, p, block * F.BM)
        seen = range_of(t, z, F, p, block)
        for tile in range(seen.begin // F.BN, tl.cdiv(seen.end, F.BN)):
            keys = keys_at(t, z, F, p, tile * F.BN, origin)
            k, v = key_vectors(z, F, p, tile * F.BN)
            d_entry = gradients_of(k, v, above, t, z, F, p, rows, keys, True).bias
            if WHICH == 0:
                entry = clamped(rows.in_table, keys.in_table, length)
            elif WHICH == 1:
                entry = clamped(rows.in_curve, keys.in_curve, length)
                x, curve, line = lines_of(t, z, F, p.h, rows, keys)
                d_entry = d_entry * tl.load(t.line_slope + line) * rows.factor[:, None]
            else:
                entry, has_one = profile_entries(z, F, rows, keys)
                d_entry = tl.where(has_one, d_entry, 0.0)
            # What is hidden, or has no weight, has nothing to give, wherever its position is.
            low = tl.min(tl.min(tl.where(d_entry != 0, entry, length), 1), 0)
            high = tl.max(tl.max(tl.where(d_entry != 0, entry, -1), 1), 0)
            for begin in range(low // F.BE * F.BE, high + 1, F.BE):
                own = begin + tl.arange(0, F.BE)
                if WHICH == 2:
                    if F.PROFILE == OF_QUERIES:
                        at, count = rows.index, z.queries
                        sums = sums_by_entry(d_entry, entry, begin, low, high, F, 1, F.BM)
                    else:
                        at, count = keys.index, z.keys
                        sums = sums_by_entry(d_entry, entry, begin, low, high, F, 0, F.BN)
                    # Few profiles at once: all would not fit into registers.
                    for first in range(0, F.PROFILES, F.BE):
                        profile = first + tl.arange(0, F.BE)
                        mixes = t.mixes + (p.bh * count + at)[None, :] * F.PROFILES + profile[:, None]
                        inside = (profile < F.PROFILES)[:, None] & (at < count)[None, :]
                        mixed_sums = product(tl.load(mixes, mask=inside, other=0.0), sums, F)
                        where = to + (part * F.PROFILES + profile)[:, None] * length + own[None, :]
                        inside = (profile < F.PROFILES)[:, None] & (own < length)[None, :]
                        tl.store(where, tl.load(where, mask=inside, other=0.0) + mixed_sums, mask=inside)
                else:
                    where = to + part * length + own
                    sums = tl.sum(sums_by_entry(d_entry, entry, begin, low, high, F, 1, F.BM), 0)
                    tl.store(where, tl.load(where, mask=own < length, other=0.0) + sums, mask=own < length)
            # The next tile reads what this one wrote, maybe by other threads.
            tl.debug_barrier()
