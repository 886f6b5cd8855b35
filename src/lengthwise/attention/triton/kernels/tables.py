"""The gradients of tables, curves and profiles: what belongs to a distance."""

import triton
import triton.language as tl

from lengthwise.attention.triton.kernels.arguments import LN2, OF_QUERIES
from lengthwise.attention.triton.kernels.reading import (
    above_at,
    key_vectors,
    keys_at,
    level_at,
    own_place,
    range_of,
    rows_at,
    vectors,
)
from lengthwise.attention.triton.kernels.scores import clamped, gradients_of, lines_of, profile_entries


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


@triton.jit(do_not_specialize=["length"])
def entries_kernel(t, z, up, to, length, F: tl.constexpr, WHICH: tl.constexpr, PROFILES: tl.constexpr):
    """The gradient of some entries of a table (WHICH 0), a curve (1) or of profiles (2), of one sequence and head."""
    p = own_place(t, z)
    begin_entry = tl.program_id(0) * F.BE
    own_entry = tl.arange(0, F.BE)
    total = tl.zeros([PROFILES, F.BE], tl.float32)
    for block in range(tl.cdiv(z.queries, F.BM)):
        origin = level_at(t.query_level, t.query_rest, p.bh * z.queries + block * F.BM, F)
        rows = rows_at(t, z, F, p, block * F.BM, origin)
        above = above_at(up, z, F, p, block * F.BM)
        seen = range_of(t, z, F, p, block)
        for tile in range(seen.begin // F.BN, tl.cdiv(seen.end, F.BN)):
            keys = keys_at(t, z, F, p, tile * F.BN, origin)
            if WHICH == 0:
                entry = clamped(rows.in_table, keys.in_table, length)
            elif WHICH == 1:
                entry = clamped(rows.in_curve, keys.in_curve, length)
            else:
                entry, has_one = profile_entries(z, F, rows, keys)
                entry = tl.where(has_one, entry, -1)
            own = (entry >= begin_entry) & (entry < begin_entry + F.BE)
            if tl.max(tl.max(tl.where(own, 1, 0), 1), 0) > 0:
                k, v = key_vectors(z, F, p, tile * F.BN)
                d_entry = gradients_of(k, v, above, t, z, F, p, rows, keys, True).bias
                if WHICH == 1:
                    x, curve, line = lines_of(t, z, F, p.h, rows, keys)
                    d_entry = d_entry * tl.load(t.line_slope + line) * rows.factor[:, None]
                for number in range(F.BE):
                    here = (own_entry == number)[None, :]
                    picked = tl.where(entry == begin_entry + number, d_entry, 0.0)
                    if WHICH == 2:
                        if F.PROFILE == OF_QUERIES:
                            base = t.mixes + p.bh * z.queries * F.PROFILES
                            mixes = vectors(base, block * F.BM, z.queries, F.PROFILES, F.PROFILES, PROFILES, F.BM, F)
                            sums = tl.sum(mixes * tl.sum(picked, 1)[:, None], 0)
                        else:
                            base = t.mixes + p.bh * z.keys * F.PROFILES
                            mixes = vectors(base, tile * F.BN, z.keys, F.PROFILES, F.PROFILES, PROFILES, F.BN, F)
                            sums = tl.sum(mixes * tl.sum(picked, 0)[:, None], 0)
                        total += tl.where(here, sums[:, None], 0.0)
                    else:
                        total += tl.where(here, tl.sum(tl.sum(picked, 1), 0), 0.0)
    entry = begin_entry + own_entry
    if WHICH == 2:
        number = tl.arange(0, PROFILES)
        where = (p.bh * F.PROFILES + number)[:, None] * length + entry[None, :]
        tl.store(to + where, total * LN2, mask=(number < F.PROFILES)[:, None] & (entry < length)[None, :])
    else:
        sums = tl.sum(total, 0)  # of one row
        tl.store(to + p.bh * length + entry, sums * LN2 if WHICH == 1 else sums, mask=entry < length)
