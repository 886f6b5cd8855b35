"""Which blocks of keys cannot matter to a block of rows; bounds.py has the proof."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lengthwise.attention.triton.kernels.arguments import ROOM
from lengthwise.attention.triton.kernels.reading import numbers


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


@triton.jit(do_not_specialize=["count"])
def bounds_kernel(
    t, z, s, good, of_keys, count, width, small, F: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr
):
    """For a block of rows and every block of keys: 1 if no row misses it and those before; and what the keys lose."""
    block, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    bh = b * z.heads + h
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
    part = tl.cast(z.batch, tl.int64) * z.heads * tl.num_programs(0) * count
    lost = tl.zeros([ROWS], tl.float32)
    for n in range(count):
        longest_k, longest_v = tl.load(s.longest_k + of_head + n), tl.load(s.longest_v + of_head + n)
        keys = tl.load(s.counts + b * count + n)
        ceiling, size = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        if F.TABLE:
            strip = s.highest + b * z.strip_batch + h * z.strip_length + ROOM
            highest = tl.load(strip + (row + (z.keys - 1) - (n * width + width - 1)), mask=inside, other=0.0)
            ceiling += highest
            size += tl.abs(highest)
        if F.LEVEL:
            rise = (level - tl.load(s.top + bh * count + n)) + (rest - tl.load(s.top_rest + bh * count + n))
            fall = slope * tl.where(rise < 0, 0.0, rise)
            ceiling += tl.where(slope >= 0, -fall, float("inf"))
            size += tl.abs(fall)
        content = q * longest_k
        upper = ceiling + content
        if F.LOGIT:
            upper = upper * factor
        if BACKWARD:
            share = tl.exp2(upper - lse)
            weighed = share * (above * longest_v + delta)
            # The gradient of a slope or a logit scale is larger the larger its part of a score is.
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
