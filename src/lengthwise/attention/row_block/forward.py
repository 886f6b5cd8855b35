"""The forward pass over the tiles of a call.

    weights = 2^scores
    out     = weights v / sum(weights)

The shift is a row's score on itself, known beforehand: any number will do that keeps 2^scores within float32's range.
Rows for which it did not are done again with their largest score, and only those, so that no row depends on a later
one.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.row_block.tiles import Block, Part, Tiles

SMALLEST_SUM = 2.0**-100
"""A sum of weights below it may have lost some to underflow."""

Rows = tuple[Float[Tensor, "head row"], Float[Tensor, "head row"], Float[Tensor, "head row value"]]
"""Of a block of rows: the shift, the sum of the weights, the weighted sum of the values."""


def forward(tiles: Tiles) -> tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]:
    """The output, and the log-sum-exp of every row in units of log 2; inf where a row sees nothing."""
    call = tiles.call
    out = tiles.zeros(*call.q.shape[:3], call.v.shape[3])
    lse = torch.full_like(out[..., 0], math.inf)
    for parts in tiles.bundles():
        own = [_own_scores(tiles, part) for part in parts]
        for block in tiles.blocks():
            rows = block.rows
            found = _block(tiles, parts, block, [shift[:, rows] for shift in own])
            for part, (shift, sums, values) in zip(parts, found, strict=True):
                good = (sums > SMALLEST_SUM) & (sums < math.inf) & values.isfinite().all(-1)
                if not good.all():
                    again = _with_largest_score(tiles, part, block)
                    shift, sums = torch.where(good, shift, again[0]), torch.where(good, sums, again[1])
                    values = torch.where(good[..., None], values, again[2])
                dead = sums == 0
                lse[part.batch, part.heads, rows] = (shift + sums.log2()).masked_fill(dead, math.inf)
                out[part.batch, part.heads, rows] = values / sums.masked_fill(dead, 1)[..., None]
    return out, lse


def _block(tiles: Tiles, parts: list[Part], block: Block, shifts: list[Tensor]) -> list[Rows]:
    """A block of rows of every part, under given shifts."""
    asked = [tiles.queries(part, block.rows, shift) for part, shift in zip(parts, shifts, strict=True)]
    sums = [tiles.zeros(*q.shape[:2]) for q in asked]
    values = [tiles.zeros(*q.shape[:2], tiles.call.v.shape[3]) for q in asked]
    for i, where in tiles.visits(parts, block, asked):
        weights = tiles.scores(parts[i], where, asked[i]).exp2_()
        heads = where.run
        sums[i][heads] += weights.sum(-1)
        values[i][heads].baddbmm_(weights, parts[i].v[heads, where.columns, :-1])
    found = zip(shifts, map(tiles.turned, sums), map(tiles.turned, values), strict=True)
    return list(found)


def _with_largest_score(tiles: Tiles, part: Part, block: Block) -> Rows:
    """A block of rows of one part, shifted by each row's largest score."""
    asked = tiles.queries(part, block.rows, part.q.new_zeros(()))
    peak = torch.full_like(asked[..., 0], -math.inf)
    for _, where in tiles.visits([part], block, [asked]):
        largest = tiles.scores(part, where, asked).amax(-1)
        peak[where.run] = torch.maximum(peak[where.run], largest)
    (found,) = _block(tiles, [part], block, [tiles.turned(peak.masked_fill(peak == -math.inf, 0))])
    return found


def _own_scores(tiles: Tiles, part: Part) -> Float[Tensor, "head query"]:
    """Every row's score on the key in its own slot, in units of log 2; on the nearest key where there is none."""
    call, start = tiles.call, tiles.visible.start
    slots = torch.arange(start, start + call.queries, device=tiles.device).clamp(0, call.keys - 1)
    content = (part.q[..., : part.dim] * part.k[:, slots, : part.dim]).sum(-1)
    bias = tiles.term.diagonal(part.batch, part.heads, slots)
    return content if bias is None else content + bias
