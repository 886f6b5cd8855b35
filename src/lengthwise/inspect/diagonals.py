"""Mean and spread along diagonals, from blocks of rows.

A block is skewed so that a diagonal becomes a column. Sums are taken about a value that stands on that diagonal, so
that where a diagonal is uniform its spread is 0 to the last bit.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.maps import Profile


class Diagonals:
    """Count, mean and sum of squared departures of every diagonal of every sequence and head, in the making.

    The last column is the least distance, `first`: so they stand in a skewed block.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, causal: bool) -> None:
        batch, heads, queries, keys = shape
        self.offset = keys - queries if causal else 0
        self.first = 0 if causal else 1 - keys
        size = queries + self.offset - self.first
        self.count = torch.zeros(batch, 1, size, dtype=torch.float64)
        self.mean, self.squares = torch.zeros(2, batch, heads, size, dtype=torch.float64)

    def add(
        self,
        x: Float[Tensor, "batch head row column"],
        may: Bool[Tensor, "#batch 1 row column"],
        rows: slice,
        columns: slice,
    ) -> None:
        """Take in a block."""
        high = rows.stop - 1 + self.offset - columns.start
        for (start, part), (_, here) in zip(_pieces(x), _pieces(may), strict=True):
            # Column c of a piece is distance high - start - c; what causality forbids is not looked at.
            size = min(part.shape[-1], high - start - self.first + 1)
            if size > 0:
                self._merge(part[..., :size], here[..., :size], high - start)

    def _merge(
        self,
        x: Float[Tensor, "batch head row diagonal"],
        here: Bool[Tensor, "#batch 1 row diagonal"],
        high: int,
    ) -> None:
        """Take in diagonals from distance `high` downwards (Chan, Golub and LeVeque's means and squares)."""
        if here.all():
            count = x.new_full((1, 1, x.shape[3]), x.shape[2], dtype=torch.float64)
            pivot = x[:, :, :1]
            about = x - pivot
        else:
            count = here.sum(2, dtype=torch.float64)
            pivot = x.gather(2, here.int().argmax(2, keepdim=True).expand(*x.shape[:2], -1, -1))
            about = (x - pivot).masked_fill_(~here, 0)
        total, squares = about.sum(2).double(), about.square_().sum(2).double()
        some_count = count.clamp(min=1)
        mean = pivot[:, :, 0].double() + total / some_count
        squares -= total.square() / some_count
        count, mean, squares = (part.cpu() for part in (count, mean, squares))

        left = self.count.shape[-1] - 1 - (high - self.first)
        there = slice(left, left + x.shape[3])
        both = self.count[..., there] + count
        away = mean - self.mean[..., there]
        share = count / both.clamp(min=1)
        self.mean[..., there] += away * share
        self.squares[..., there] += squares.clamp(min=0) + away.square() * self.count[..., there] * share
        self.count[..., there] = both

    def profile(self) -> Profile:
        """Over all sequences."""
        count = self.count.sum(0)
        some = count.clamp(min=1)
        mean = (self.mean * self.count).sum(0) / some
        between = (self.count * (self.mean - mean).square()).sum(0)
        spread = ((self.squares.sum(0) + between) / some).sqrt()
        none = count == 0
        return Profile(self.first, *(x.masked_fill(none, torch.nan).flip(-1).float() for x in (mean, spread)))

    def spread(self) -> Float[Tensor, " head"]:
        """How far pairs are from the mean of their own diagonal in their own sequence, root mean square."""
        return (self.squares.sum((0, 2)) / self.count.sum().clamp(min=1)).sqrt().float()


def _pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A skewed block in pieces, each with its first column there.

    Diagonals that cross every row are most of it, and lie in memory as rows one longer: they are not copied.
    """
    rows, columns = x.shape[-2:]
    corner = rows - 1
    if columns < rows:
        yield 0, skewed(x)
        return
    if corner:
        yield 0, skewed(x[..., :corner])[..., :corner]
    shape, (*outer, down, across) = (*x.shape[:-1], columns - corner), x.stride()
    yield corner, x.as_strided(shape, (*outer, down + across, across), x.storage_offset())
    if corner:
        yield columns, skewed(x[..., -corner:])[..., -corner:]


def skewed(x: Tensor) -> Tensor:
    """(..., row, column) as (..., row, row + column - 1) with diagonals as columns, 0 where there is nothing.

    >>> skewed(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    tensor([[0, 1, 2, 3],
            [4, 5, 6, 0]])
    """
    *shape, rows, columns = x.shape
    wider = columns + rows - 1
    made = x.new_zeros(*shape, rows, wider)
    # Each row begins one place before that below: seen with rows one shorter, it is where the block lies.
    strides = (*made.stride()[:-2], wider - 1, 1)
    made.as_strided(x.shape, strides, rows - 1).copy_(x)
    return made


def uniform(bias: Bias, *, causal: bool) -> Profile | None:
    """The profile of a bias that is seen to depend on distance alone; None where it is not, or that is hard to see."""
    _, _, queries, keys = bias.shape
    if bias.shape[0] != 1 or queries != keys or not bias.is_uniform:
        return None
    past = bias.tile(slice(queries - 1, queries), slice(None))[0, :, 0].flip(-1)
    if causal:
        return Profile(0, past.float().cpu(), torch.zeros_like(past, device="cpu").float())
    ahead = bias.tile(slice(0, 1), slice(1, None))[0, :, 0].flip(-1)
    mean = torch.cat([ahead, past], -1).float().cpu()
    return Profile(1 - keys, mean, torch.zeros_like(mean))
