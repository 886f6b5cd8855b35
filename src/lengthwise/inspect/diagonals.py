"""Mean and spread along diagonals, from blocks of rows.

A block is skewed so that a diagonal becomes a column. Sums are taken about a value that stands on that diagonal, so
that where a diagonal is uniform its spread is 0 to the last bit.
"""

from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.maps import Profile


@dataclass(frozen=True, eq=False)
class Piece:
    """Some neighbouring diagonals of a block of rows."""

    columns: slice
    """The columns of the block that they are in."""
    skewed: slice
    """Where they are once these columns are skewed."""
    highest: int
    """The distance of the first one; the next are one lower each."""
    crosses: bool
    """Whether each of them crosses every row: such diagonals are not copied, see `_crossing`."""
    count: Float[Tensor, "#batch 1 diagonal"]
    """How many visible pairs each of them has."""
    mask: Bool[Tensor, "#batch 1 row diagonal"] | None = None
    """None where every pair is visible."""


class Diagonals:
    """Count, mean and sum of squared deviations of every diagonal of every sequence and head, while rows are added.

    The last column is the least distance, `first`: the order of a skewed block.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, causal: bool) -> None:
        self.batch, self.heads, queries, keys = shape
        self.offset = keys - queries if causal else 0
        self.first = 0 if causal else 1 - keys
        size = queries + self.offset - self.first
        self.count = torch.zeros(self.batch, 1, size, dtype=torch.float64)
        self.mean, self.squares = torch.zeros(2, self.batch, self.heads, size, dtype=torch.float64)
        self._added: dict[Piece, tuple[Tensor, ...]] = {}

    def pieces(self, mask: Bool[Tensor, "#batch 1 row column"], rows: slice, columns: slice) -> list[Piece]:
        """A block's diagonals: those that cross every row, and those in the corners beside them."""
        height, width = mask.shape[-2:]
        corner, highest = height - 1, rows.stop - 1 + self.offset - columns.start
        if width < height:
            spans = [(0, slice(0, width), slice(0, width + corner), False)]
        else:
            spans = [(corner, slice(0, width), slice(0, width - corner), True)]
            if corner:
                spans.append((0, slice(0, corner), slice(0, corner), False))
                spans.append((width, slice(width - corner, width), slice(corner, 2 * corner), False))
        pieces = []
        for start, own_columns, skewed_columns, crosses in spans:
            # What causality hides is left out.
            size = min(skewed_columns.stop - skewed_columns.start, highest - start - self.first + 1)
            if size > 0:
                some = slice(skewed_columns.start, skewed_columns.start + size)
                part = (_crossing(mask) if crosses else skewed(mask[..., own_columns]))[..., some]
                everywhere = bool(part.all())
                count = part.sum(2, dtype=torch.float64).cpu()
                piece = Piece(own_columns, some, highest - start, crosses, count, None if everywhere else part)
                pieces.append(piece)
        return pieces

    def begin_rows(self, pieces: list[Piece], height: int, like: Tensor) -> None:
        """Make room for all heads of some rows, of the dtype and on the device of a tensor."""
        for piece in pieces:
            # Corners are small: they wait until all heads are there.
            crossing, corner = (3, piece.count.shape[-1]), (1, height, piece.columns.stop - piece.columns.start)
            count, *size = crossing if piece.crosses else corner
            self._added[piece] = tuple(like.new_empty(self.batch, self.heads, *size) for _ in range(count))

    def add(self, x: Float[Tensor, "batch head row column"], heads: slice) -> None:
        """Take in some heads of the rows that were begun; threads may add different heads at once."""
        for piece, room in self._added.items():
            parts = _sums(_crossing(x)[..., piece.skewed], piece.mask) if piece.crosses else (x[..., piece.columns],)
            for whole, part in zip(room, parts, strict=True):
                whole[:, heads] = part

    def end_rows(self) -> None:
        """Count the rows, now that all heads are there (Chan, Golub and LeVeque's means and squares)."""
        for piece, parts in self._added.items():
            sums = parts if piece.crosses else _sums(skewed(parts[0])[..., piece.skewed], piece.mask)
            pivot, total, squares = (part.cpu().double() for part in sums)
            count = piece.count
            some_count = count.clamp(min=1)
            mean = pivot + total / some_count
            squares -= total.square() / some_count

            left = self.count.shape[-1] - 1 - (piece.highest - self.first)
            there = slice(left, left + count.shape[-1])
            both = self.count[..., there] + count
            away = mean - self.mean[..., there]
            share = count / both.clamp(min=1)
            self.mean[..., there] += away * share
            self.squares[..., there] += squares.clamp(min=0) + away.square() * self.count[..., there] * share
            self.count[..., there] = both
        self._added = {}

    def shifted(self, profile: Profile) -> "Diagonals":
        """Those of the same numbers with a number per distance and head added."""
        assert profile.first == self.first
        other = copy(self)
        other.mean = self.mean + profile.mean.flip(-1).double()
        return other

    def profile(self) -> Profile:
        """Over all sequences."""
        count = self.count.sum(0)
        some_count = count.clamp(min=1)
        mean = (self.mean * self.count).sum(0) / some_count
        between = (self.count * (self.mean - mean).square()).sum(0)
        spread = ((self.squares.sum(0) + between) / some_count).sqrt()
        empty = count == 0
        return Profile(self.first, *(x.masked_fill(empty, torch.nan).flip(-1).float() for x in (mean, spread)))

    def spread(self) -> Float[Tensor, " head"]:
        """How far pairs are from the mean of their own diagonal in their own sequence, root mean square."""
        return (self.squares.sum((0, 2)) / self.count.sum().clamp(min=1)).sqrt().float()


def _sums(x: Float[Tensor, "batch head row diagonal"], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A value on each diagonal, and the sums of the deviations from it and of their squares."""
    if mask is None:
        pivot = x[:, :, :1]
        about = x - pivot
    else:
        pivot = x.gather(2, mask.int().argmax(2, keepdim=True).expand(*x.shape[:2], -1, -1))
        about = (x - pivot).masked_fill_(~mask, 0)
    return pivot[:, :, 0], about.sum(2), about.square_().sum(2)


def _crossing(x: Tensor) -> Tensor:
    """The diagonals that cross every row, as columns: they lie in memory as rows one longer and are not copied."""
    rows, columns = x.shape[-2:]
    *outer, down, across = x.stride()
    return x.as_strided((*x.shape[:-1], columns - rows + 1), (*outer, down + across, across), x.storage_offset())


def skewed(x: Tensor) -> Tensor:
    """(..., row, column) as (..., row, row + column - 1) with diagonals as columns, 0 where there is nothing.

    >>> skewed(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    tensor([[0, 1, 2, 3],
            [4, 5, 6, 0]])
    """
    *shape, rows, columns = x.shape
    wider = columns + rows - 1
    padded = x.new_zeros(*shape, rows, wider)
    # Each row begins one place before the one below: with rows one shorter this is where the block lies.
    strides = (*padded.stride()[:-2], wider - 1, 1)
    padded.as_strided(x.shape, strides, rows - 1).copy_(x)
    return padded


def uniform_profile(bias: Bias, *, causal: bool) -> Profile | None:
    """The profile of a bias that is known to depend on distance alone; None where it does not, or nobody knows."""
    _, _, queries, keys = bias.shape
    if bias.shape[0] != 1 or queries != keys or not bias.is_uniform:
        return None
    past = bias.tile(slice(queries - 1, queries), slice(None))[0, :, 0].flip(-1)
    if causal:
        return Profile(0, past.float().cpu(), torch.zeros_like(past, device="cpu").float())
    ahead = bias.tile(slice(0, 1), slice(1, None))[0, :, 0].flip(-1)
    mean = torch.cat([ahead, past], -1).float().cpu()
    return Profile(1 - keys, mean, torch.zeros_like(mean))
