"""A matrix of every head pooled by tiles, from blocks of rows, so that the whole of it is never alive.

A picture has fewer pixels than a long sequence has pairs of tokens. A tile keeps the mean of its pairs, and the least
and the greatest, so that what is narrow is not lost in the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias

BLOCK = 2**20
"""How many numbers a block of rows may have, of all heads and sequences: little enough for a processor's cache."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The mean, the least and the greatest of tiles of `pool` queries by `pool` keys; NaN where no pair may meet."""

    pool: int
    mean: Float[Tensor, "head row column"]
    least: Float[Tensor, "head row column"]
    greatest: Float[Tensor, "head row column"]

    @property
    def exact(self) -> bool:
        """Whether every tile is one pair."""
        return self.pool == 1


class TilePool:
    """Tiles in the making; every block begins at a multiple of `pool`."""

    def __init__(self, heads: int, queries: int, keys: int, pool: int) -> None:
        self.pool, self.shape = pool, (heads, -(-queries // pool), -(-keys // pool))
        kept = 1 if pool == 1 else 3
        self.kept = [torch.full(self.shape, torch.nan) for _ in range(kept)]

    def add(
        self, x: Float[Tensor, "head row column"], may: Bool[Tensor, "row column"], rows: slice, columns: slice
    ) -> None:
        """Take in a block; what `may` forbids does not count."""
        x = x.float()
        if self.pool == 1:
            self.kept[0][:, rows, columns] = x.masked_fill(~may, torch.nan)
            return
        p = self.pool
        extra = (0, -x.shape[2] % p, 0, -x.shape[1] % p)
        x, may = F.pad(x, extra), F.pad(may, extra)
        count = F.avg_pool2d(may[None].float(), p)
        mean = F.avg_pool2d(x.masked_fill(~may, 0), p) / count
        least = -F.max_pool2d((-x).masked_fill(~may, -torch.inf), p)
        greatest = F.max_pool2d(x.masked_fill(~may, -torch.inf), p)
        rows, columns = (slice(s.start // p, -(-s.stop // p)) for s in (rows, columns))
        for kept, found in zip(self.kept, (mean, least, greatest), strict=True):
            kept[:, rows, columns] = found.masked_fill(count == 0, torch.nan)

    def done(self) -> Tiles:
        """The tiles."""
        mean, least, greatest = self.kept if self.pool > 1 else self.kept * 3
        return Tiles(self.pool, mean, least, greatest)


def blocks(shape: tuple[int, int, int, int], pool: int, *, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows of a (batch, head, query, key) matrix, each with the columns that it may reach.

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
    made = TilePool(heads, queries, keys, pool)
    for rows, columns in blocks(bias.shape, pool, causal=causal):
        may = order(rows, columns, queries, keys)
        made.add(bias.tile(rows, columns)[0], may if causal else torch.ones_like(may), rows, columns)
    return made.done()
