"""Mean and spread along diagonals, from blocks of rows.

A block is skewed so that a diagonal becomes a column. Sums are taken about a value that stands on that diagonal, so
that where a diagonal is uniform its spread is 0 to the last bit.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias, DistanceBias, LevelBias, wide
from lengthwise.views.maps import Profile


class Diagonals:
    """Count, mean and sum of squared departures of every diagonal of every sequence and head, in the making."""

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
        """Take in a block (Chan, Golub and LeVeque's merging of means and squares)."""
        x, here = skewed(x), skewed(may).expand(x.shape[0], -1, -1, -1)
        count = here.sum(2).double()
        pivot = x.gather(2, here.int().argmax(2, keepdim=True).expand(-1, x.shape[1], -1, -1))
        about = (x - pivot).masked_fill_(~here, 0)
        total, squares = about.sum(2).double(), about.square_().sum(2).double()
        some = count.clamp(min=1)
        mean = pivot[:, :, 0].double() + total / some
        squares = squares - total.square() / some
        count, mean, squares = count.cpu(), mean.cpu(), squares.cpu()

        # Column c of the skewed block is distance c + low; what causality forbids is not kept at all.
        low = rows.start + self.offset - (columns.stop - 1)
        skip = max(0, self.first - low)
        here_, there = slice(skip, None), slice(low + skip - self.first, low - self.first + x.shape[3])
        count, mean, squares = count[..., here_], mean[..., here_], squares[..., here_]
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
        return Profile(self.first, *(x.masked_fill(none, torch.nan).float() for x in (mean, spread)))

    def spread(self) -> Float[Tensor, " head"]:
        """How far pairs are from the mean of their own diagonal in their own sequence, root mean square."""
        return (self.squares.sum((0, 2)) / self.count.sum().clamp(min=1)).sqrt().float()


def skewed(x: Tensor) -> Tensor:
    """(..., row, column) as (..., row, row + column - 1) with diagonals as columns, 0 where there is nothing.

    >>> skewed(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    tensor([[3, 2, 1, 0],
            [0, 6, 5, 4]])
    """
    *shape, rows, columns = x.shape
    wider = columns + rows - 1
    flat = F.pad(x.flip(-1), (0, rows)).flatten(-2)
    return flat[..., : rows * wider].view(*shape, rows, wider)


def uniform(bias: Bias, *, causal: bool) -> Profile | None:
    """The profile of a bias that is seen to depend on distance alone; None where it is not, or that is hard to see."""
    _, _, queries, keys = bias.shape
    if bias.shape[0] != 1 or queries != keys or not _steady(bias):
        return None
    past = bias.tile(slice(queries - 1, queries), slice(None))[0, :, 0].flip(-1)
    if causal:
        return Profile(0, past.float().cpu(), torch.zeros_like(past, device="cpu").float())
    ahead = bias.tile(slice(0, 1), slice(1, None))[0, :, 0].flip(-1)
    mean = torch.cat([ahead, past], -1).float().cpu()
    return Profile(1 - keys, mean, torch.zeros_like(mean))


def _steady(bias: Bias) -> bool:
    """Whether queries and keys stand in even steps, and slopes do not change."""
    if isinstance(bias, DistanceBias):
        return all(bool((x.diff() == 1).all()) for x in (bias.query, bias.key))
    if isinstance(bias, LevelBias):
        steps = torch.cat([bias.query_level.diff(), bias.key_level.diff()], -1)
        slopes = wide(bias.slope)
        return bool((steps == steps[..., :1]).all() and (slopes == slopes[..., :1]).all())
    return False
