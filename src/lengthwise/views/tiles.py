"""A matrix of every head pooled by tiles, from blocks of rows, so that the whole of it is never alive.

A figure has fewer pixels than a long sequence has pairs of tokens. A tile keeps the mean of its pairs, and the least
and the greatest, so that what is narrow is not lost in the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias

BLOCK = 2**21
"""How many numbers a block of rows has at most, of all heads and sequences: few enough for a processor's cache."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Mean, least and greatest of tiles of `pool` queries by `pool` keys; NaN where all pairs are masked."""

    pool: int
    mean: Float[Tensor, "head row column"]
    least: Float[Tensor, "head row column"]
    greatest: Float[Tensor, "head row column"]

    @property
    def exact(self) -> bool:
        """Whether every tile is one pair."""
        return self.pool == 1


class TilePool:
    """Collects tiles from blocks, each of which begins at a multiple of `pool`."""

    def __init__(self, heads: int, queries: int, keys: int, pool: int) -> None:
        self.pool, self.shape = pool, (heads, -(-queries // pool), -(-keys // pool))
        self._results = [torch.full(self.shape, torch.nan) for _ in range(1 if pool == 1 else 3)]

    def add(
        self, x: Float[Tensor, "head row column"], mask: Bool[Tensor, "row column"], rows: slice, columns: slice
    ) -> None:
        """Add a block; pairs that are masked (False) do not count."""
        if self.pool == 1:
            self._results[0][:, rows, columns] = fill(x.float().clone(), mask, torch.nan)
            return
        p = self.pool
        if x.shape[-1] % p or x.shape[-2] % p:
            x, mask = (F.pad(part, (0, -part.shape[-1] % p, 0, -part.shape[-2] % p)) for part in (x, mask))
        # Columns that all rows see need no mask, and under causality they are most.
        free = first_forbidden(mask) // p * p
        rows = slice(rows.start // p, -(-rows.stop // p))
        for span, span_mask in ((slice(0, free), None), (slice(free, x.shape[2]), mask[:, free:])):
            if span.start < span.stop:
                target = slice(columns.start // p + span.start // p, columns.start // p + span.stop // p)
                for result, pooled in zip(self._results, _pooled(x[:, :, span].float(), span_mask, p), strict=True):
                    result[:, rows, target] = pooled

    def done(self) -> Tiles:
        """The tiles."""
        mean, least, greatest = self._results if self.pool > 1 else self._results * 3
        return Tiles(self.pool, mean, least, greatest)


def _pooled(x: Tensor, mask: Tensor | None, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, least and greatest of every tile of a block; rows go first, since along them memory is read in order."""
    if mask is None:
        by_rows = x.unflatten(1, (-1, p))
        total, least, greatest = by_rows.sum(2), by_rows.amin(2), by_rows.amax(2)
        total, least, greatest = (part.unflatten(2, (-1, p)) for part in (total, least, greatest))
        return total.sum(3) / p**2, least.amin(3), greatest.amax(3)
    tiles = x.unflatten(2, (-1, p)).unflatten(1, (-1, p))
    visible = mask.unflatten(1, (-1, p)).unflatten(0, (-1, p))
    count = visible.sum((1, 3))
    mean = tiles.masked_fill(~visible, 0).sum((2, 4)) / count
    least = tiles.masked_fill(~visible, torch.inf).amin((2, 4))
    greatest = tiles.masked_fill(~visible, -torch.inf).amax((2, 4))
    return mean, least.masked_fill(count == 0, torch.nan), greatest.masked_fill(count == 0, torch.nan)


def first_forbidden(mask: Bool[Tensor, "*batch row column"]) -> int:
    """The first column that some row does not see: all before it need no mask."""
    # The minimum of bytes is eight times as fast as `all` of booleans.
    masked = mask.flatten(0, -2).view(torch.uint8).amin(0) == 0
    return int(masked.int().argmax()) if masked.any() else mask.shape[-1]


def fill(x: Tensor, mask: Bool[Tensor, "*batch row column"], value: float) -> Tensor:
    """x, in place, with a value where it is masked; only columns with masked rows are touched."""
    free = first_forbidden(mask)
    x[..., free:].masked_fill_(~mask[..., free:], value)
    return x


def blocks(shape: tuple[int, int, int, int], pool: int, *, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows of a (batch, head, query, key) matrix, each with the columns that its rows see.

    Queries are the last slots where there are fewer of them than keys.
    """
    batch, heads, queries, keys = shape
    count = max(1, BLOCK // (batch * heads * keys * pool)) * pool
    for first in range(0, queries, count):
        last = min(first + count, queries)
        yield slice(first, last), slice(0, max(1, min(keys, last + keys - queries)) if causal else keys)


def order(rows: slice, columns: slice, queries: int, keys: int) -> Bool[Tensor, "row column"]:
    """Which keys of a block stand at or before the query."""
    slots = torch.arange(rows.start, rows.stop)[:, None] + keys - queries
    return torch.arange(columns.start, columns.stop) <= slots


def tiles_of(bias: Bias, resolution: int, *, causal: bool) -> Tiles:
    """The tiles of a bias, at most `resolution` along either side; of the first sequence if it has several."""
    _, heads, queries, keys = bias.shape
    pool = -(-max(queries, keys) // resolution)
    tile_pool = TilePool(heads, queries, keys, pool)
    for rows, columns in blocks(bias.shape, pool, causal=causal):
        mask = order(rows, columns, queries, keys)
        tile_pool.add(bias.tile(rows, columns)[0], mask if causal else torch.ones_like(mask), rows, columns)
    return tile_pool.done()
