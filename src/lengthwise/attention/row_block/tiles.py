"""A call cut in tiles: a block of rows meets a span of keys, and nothing larger is ever alive.

    scores = scale q k^T + bias - shift      one product: the shift, and a level's bias, ride in extra channels

All scores are in units of log 2, because exp2 is cheaper than exp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.terms import LOG2E, Term, Where
from lengthwise.attention.row_block.visible import Visible
from lengthwise.bias import at_least_float32

ROWS, COLUMNS, HEADS = 128, 512, 6
"""The largest tile: HEADS times ROWS x COLUMNS scores, small enough for the cache, large enough for the product."""

Firsts = list[list[list[int]]] | None
"""The first key that is kept, by sequence, head and block of rows; None keeps all."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some heads of one sequence. Channels behind the content: shift and slope in q, 1 and level in k, 1 in v."""

    batch: int
    heads: slice
    q: Float[Tensor, "head query dim+channels"]
    k: Float[Tensor, "head key dim+channels"]
    v: Float[Tensor, "head key value+1"]

    @property
    def dim(self) -> int:
        """The width of the content."""
        return self.q.shape[2] - 2


@dataclass(frozen=True)
class Block:
    """Some rows, and their number among the blocks."""

    index: int
    rows: slice


class Tiles:
    """One call, cut in tiles."""

    def __init__(self, visible: Visible, term: Term, firsts: Firsts) -> None:
        self.call, self.visible, self.term, self.firsts = visible.call, visible, term, firsts
        call = self.call
        self.dtype, self.device = at_least_float32(call.q).dtype, call.q.device
        self.rows, self.columns, self.heads = sizes(call, whole=term.whole)
        tile = self.heads * min(self.rows, call.queries) * min(self.columns, call.keys)
        self.first, self.second = (torch.empty(tile, dtype=self.dtype, device=self.device) for _ in range(2))

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the precision that everything is computed in."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks."""
        for index, row in enumerate(range(0, self.call.queries, self.rows)):
            yield Block(index, slice(row, min(row + self.rows, self.call.queries)))

    def bundles(self) -> Iterator[list[Part]]:
        """Parts that share their tiles: all sequences where a tile is dear, else one part at a time."""
        call = self.call
        groups = [slice(head, min(head + self.heads, call.heads)) for head in range(0, call.heads, self.heads)]
        if self.term.whole:
            yield [self._part(batch, groups[0]) for batch in range(call.batch)]
        else:
            for batch in range(call.batch):
                for heads in groups:
                    yield [self._part(batch, heads)]

    def _part(self, batch: int, heads: slice) -> Part:
        call = self.call
        shared: slice | Tensor = heads
        if call.group > 1:
            shared = torch.arange(heads.start, heads.stop, device=self.device) // call.group
        q, (k, v) = (
            at_least_float32(call.q[batch, heads]),
            (at_least_float32(x[batch, shared]) for x in (call.k, call.v)),
        )
        zero, one = q.new_zeros(*q.shape[:2], 1), k.new_ones(*k.shape[:2], 1)
        slope = self.term.slopes(batch, heads)
        q = torch.cat([q * (call.scale * LOG2E), zero, zero if slope is None else slope[..., None]], -1)
        return Part(batch, heads, q, torch.cat([k, one, torch.zeros_like(one)], -1), torch.cat([v, one], -1))

    def turned(self, x: Float[Tensor, "head row *rest"]) -> Float[Tensor, "head row *rest"]:
        """A block of rows from the order of the call into that of the tiles, or back."""
        return x.flip(1) if self.term.flip else x

    def queries(self, part: Part, rows: slice, shift: Tensor) -> Tensor:
        """A block of queries that carries its shift, backwards in time where the term wants it so."""
        q = part.q[:, rows].clone()
        q[..., part.dim] = -shift
        return self.turned(q)

    def visits(self, parts: list[Part], block: Block, asked: list[Tensor]) -> Iterator[tuple[int, Where]]:
        """Every tile of a block of rows, nearest keys first: the part's number and the place."""
        low, high = self._span(parts, block)
        own = max(low, min(high, self.visible.slots(block.rows)[0])) if self.term.splits else high
        for columns in self._columns(own, high):
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, block, columns, far=False))
        far = False
        if low < own and self.term.splits:
            ((part, q),) = zip(parts, asked, strict=True)
            shift, level = q[..., part.dim], part.k[..., part.dim + 1]
            far = self.term.aim(part.batch, part.heads, block.rows, slice(low, own), shift, level)
        for columns in self._columns(low, own):
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, block, columns, far=far))

    def _span(self, parts: list[Part], block: Block) -> tuple[int, int]:
        """The keys that a block of rows has to visit, from and up to."""
        low, high = self.visible.span(slice(parts[0].batch, parts[-1].batch + 1), block.rows)
        if self.firsts is not None:
            (part,) = parts
            low = max(low, min(firsts[block.index] for firsts in self.firsts[part.batch][part.heads]))
        return low, high

    def _columns(self, low: int, high: int) -> list[slice]:
        """The keys from low up to high as spans, the nearest first."""
        return [slice(max(low, at - self.columns), at) for at in range(high, low, -self.columns)]

    def _runs(self, part: Part, block: Block, columns: slice, *, far: bool) -> Iterator[Where]:
        """The neighbouring heads that keep something of a span of keys, together."""
        count = part.heads.stop - part.heads.start
        if self.firsts is None:
            yield Where(part.batch, part.heads, slice(0, count), block.rows, columns, far)
            return
        firsts = [of_head[block.index] for of_head in self.firsts[part.batch][part.heads]]
        head = 0
        while head < count:
            stop = head
            while stop < count and firsts[stop] < columns.stop:
                stop += 1
            if stop > head:
                kept = slice(max(columns.start, min(firsts[head:stop])), columns.stop)
                yield Where(part.batch, part.heads, slice(head, stop), block.rows, kept, far)
            head = stop + 1

    def scores(self, part: Part, where: Where, q: Tensor) -> Float[Tensor, "head row column"]:
        """A tile of scores, less the shift that the queries carry; it lives until the next is asked for."""
        width = part.dim + (2 if where.far else 1)
        q, k = q[where.run, :, :width], part.k[where.run, where.columns, :width].transpose(1, 2)
        scores = buffer(self.first, where)
        bias = self.term.tile(where)
        may = self.visible.mask(part.batch, where.rows, where.columns, order=not self.term.knows_order)
        if may is not None:
            may = may.flip(0) if self.term.flip else may
            bias = (q.new_zeros(()) if bias is None else bias).masked_fill(~may, -math.inf)
            bias = bias if bias.ndim == 3 else bias[None]
        if bias is None:
            return torch.bmm(q, k, out=scores)
        return torch.baddbmm(bias, q, k, out=scores)


def buffer(flat: Tensor, where: Where) -> Float[Tensor, "head row column"]:
    """The beginning of a flat piece of memory in the shape of a tile."""
    return flat[: math.prod(where.shape)].view(where.shape)


def sizes(call: Call, *, whole: bool) -> tuple[int, int, int]:
    """Rows, columns and heads of a tile."""
    return (ROWS, max(COLUMNS // 2, 1), call.heads) if whole else (ROWS, COLUMNS, min(HEADS, call.heads))
