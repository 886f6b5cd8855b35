"""Mean and spread along diagonals, from blocks of rows.

A block is skewed so that a diagonal becomes a column. Sums are taken about a value that stands on that diagonal, so
that where a diagonal is uniform its spread is 0 to the last bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.maps import Profile


@dataclass(frozen=True, eq=False)
class MaskPiece:
    """A part of a skewed mask, which all heads and quantities of a block share."""

    highest: int
    """The distance of its first column; the next ones are one lower each."""
    size: int
    """How many columns belong to distances that are counted."""
    mask: Bool[Tensor, "#batch 1 row diagonal"] | None
    """None where every pair is visible."""


class Diagonals:
    """Count, mean and sum of squared deviations of every diagonal of every sequence and head, while blocks are added.

    The last column is the least distance, `first`: the order of a skewed block.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, causal: bool) -> None:
        batch, heads, queries, keys = shape
        self.offset = keys - queries if causal else 0
        self.first = 0 if causal else 1 - keys
        size = queries + self.offset - self.first
        self.count, self.mean, self.squares = torch.zeros(3, batch, heads, size, dtype=torch.float64)

    def pieces(self, mask: Bool[Tensor, "#batch 1 row column"], rows: slice, columns: slice) -> list[MaskPiece]:
        """The mask of a block as `add` takes it."""
        highest = rows.stop - 1 + self.offset - columns.start
        pieces = []
        for start, piece in _skewed_pieces(mask):
            # What causality hides is left out.
            size = max(0, min(piece.shape[-1], highest - start - self.first + 1))
            here = piece[..., :size]
            pieces.append(MaskPiece(highest - start, size, None if here.all() else here))
        return pieces

    def add(self, x: Float[Tensor, "batch head row column"], pieces: list[MaskPiece], heads: slice) -> None:
        """Take in a block of some heads."""
        for (_, part), piece in zip(_skewed_pieces(x), pieces, strict=True):
            if piece.size:
                self._merge(part[..., : piece.size], piece, heads)

    def _merge(self, x: Float[Tensor, "batch head row diagonal"], piece: MaskPiece, heads: slice) -> None:
        """Take in diagonals from the highest distance downwards (Chan, Golub and LeVeque's means and squares)."""
        if piece.mask is None:
            count = x.new_full((1, 1, x.shape[3]), x.shape[2], dtype=torch.float64)
            pivot = x[:, :, :1]
            about = x - pivot
        else:
            count = piece.mask.sum(2, dtype=torch.float64)
            pivot = x.gather(2, piece.mask.int().argmax(2, keepdim=True).expand(*x.shape[:2], -1, -1))
            about = (x - pivot).masked_fill_(~piece.mask, 0)
        total, squares = about.sum(2).double(), about.square_().sum(2).double()
        some_count = count.clamp(min=1)
        mean = pivot[:, :, 0].double() + total / some_count
        squares -= total.square() / some_count
        count, mean, squares = (part.cpu() for part in (count, mean, squares))

        left = self.count.shape[-1] - 1 - (piece.highest - self.first)
        there = slice(left, left + x.shape[3])
        before = self.count[:, heads, there]
        both = before + count
        away = mean - self.mean[:, heads, there]
        share = count / both.clamp(min=1)
        self.mean[:, heads, there] += away * share
        self.squares[:, heads, there] += squares.clamp(min=0) + away.square() * before * share
        self.count[:, heads, there] = both

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
        return (self.squares.sum((0, 2)) / self.count.sum((0, 2)).clamp(min=1)).sqrt().float()


def _skewed_pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
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
