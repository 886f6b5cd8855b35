"""A call cut in tiles: a block of rows meets a span of keys, and nothing larger is ever alive.

    scores = scale q k^T + bias - shift      one product: the shift, and a level's bias, ride in extra channels

Under a softcap or a logit scale content and bias are apart, and the steps are taken one by one. All scores are in
units of log 2, because exp2 is cheaper than exp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms import LOG2E, Term, Where
from lengthwise.bias import at_least_float32
from lengthwise.visibility import Visibility

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
    sink: Float[Tensor, "head query"] | None
    factor: Float[Tensor, "head query"] | None
    """The logit scale."""

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
    """One call, cut in tiles; its keys and values are finite."""

    def __init__(self, call: AttentionCall, term: Term, firsts: Firsts) -> None:
        self.call, self.term, self.firsts = call, term, firsts
        self.dtype, self.device = at_least_float32(call.q[:0]).dtype, call.q.device
        self.start = int(call.layout.start)
        self.in_steps = call.softcap is not None or call.logit_scale is not None
        """Whether scores are not one product."""
        self.splits = term.splits and not self.in_steps
        self.cap = None if call.softcap is None else call.softcap * LOG2E
        self.rows, self.columns, self.heads = tile_sizes(call, whole=term.whole)
        size = self.heads * min(self.rows, call.queries) * min(self.columns, call.keys)
        self.first, self.second, self.content, self.raw = (
            torch.empty(n, dtype=self.dtype, device=self.device) for n in (size, size, *[size * self.in_steps] * 2)
        )
        self.spans = _Spans(call.visibility, self.rows)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the precision that everything is computed in."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks."""
        for index, row in enumerate(range(0, self.call.queries, self.rows)):
            yield Block(index, slice(row, min(row + self.rows, self.call.queries)))

    def bundles(self) -> Iterator[list[Part]]:
        """Parts that share their tiles: all sequences where a tile is expensive, else one part at a time."""
        call = self.call
        groups = [slice(head, min(head + self.heads, call.heads)) for head in range(0, call.heads, self.heads)]
        if self.term.whole and call.batch:
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
        k, v = torch.cat([k, one, torch.zeros_like(one)], -1), torch.cat([v, one], -1)
        whole = (call.batch, call.heads, call.queries)
        sink, factor = (
            None if x is None else at_least_float32(x).to(self.dtype).expand(whole)[batch, heads]
            for x in (call.sink, call.logit_scale)
        )
        return Part(batch, heads, q, k, v, sink, factor)

    def turned(self, x: Float[Tensor, "head row *rest"]) -> Float[Tensor, "head row *rest"]:
        """A block of rows from the order of the call into that of the tiles, or back."""
        return x.flip(1) if self.term.flip else x

    def queries(self, part: Part, rows: slice, shift: Tensor) -> Tensor:
        """A block of queries that carries its shift, backwards in time where the term wants it so."""
        q = part.q[:, rows].clone()
        q[..., part.dim] = -shift
        return self.turned(q)

    def visits(self, parts: list[Part], block: Block, queries: list[Tensor]) -> Iterator[tuple[int, Where]]:
        """Every tile of a block of rows, nearest keys first: the part's number and the place."""
        low, high = self._span(parts, block)
        own = max(low, min(high, self.start + block.rows.start)) if self.splits else high
        for columns in self._columns(own, high):
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, block, columns, far=False))
        far = False
        if low < own and self.splits:
            ((part, q),) = zip(parts, queries, strict=True)
            shift, level = q[..., part.dim], part.k[..., part.dim + 1]
            far = self.term.aim(part.batch, part.heads, block.rows, slice(low, own), shift, level)
        for columns in self._columns(low, own):
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, block, columns, far=far))

    def _span(self, parts: list[Part], block: Block) -> tuple[int, int]:
        """The keys that a block of rows has to visit, from and up to."""
        spans = [self.spans.outer(part.batch, block.index) for part in parts]
        low, high = min(span[0] for span in spans), max(span[1] for span in spans)
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
        scores = self._in_steps(part, where, q) if self.in_steps else self._product(part, where, q)
        mask = self.spans.mask(where)
        if mask is not None:
            hidden = ~(mask.flip(1) if self.term.flip else mask)
            scores[..., -mask.shape[2] :].masked_fill_(hidden, -math.inf)
        return scores

    def _product(self, part: Part, where: Where, q: Tensor) -> Tensor:
        width = part.dim + (2 if where.far else 1)
        q, k = q[where.run, :, :width], part.k[where.run, where.columns, :width].transpose(1, 2)
        scores, bias = buffer(self.first, where), self.term.tile(where)
        return torch.bmm(q, k, out=scores) if bias is None else torch.baddbmm(bias, q, k, out=scores)

    def _in_steps(self, part: Part, where: Where, q: Tensor) -> Tensor:
        """What the backward pass needs stays in `content`, after the cap, and in `raw`, with the bias."""
        q, k = q[where.run], part.k[where.run, where.columns, : part.dim].transpose(1, 2)
        content, raw, scores = (buffer(x, where) for x in (self.content, self.raw, self.first))
        torch.bmm(q[..., : part.dim], k, out=content)
        if self.cap is not None:
            content.div_(self.cap).tanh_().mul_(self.cap)
        bias = self.term.tile(where)
        raw = content if bias is None else torch.add(content, bias, out=raw)
        shift, factor = q[..., part.dim, None], self.factors(part, where)
        return torch.add(raw, shift, out=scores) if factor is None else torch.addcmul(shift, raw, factor, out=scores)

    def factors(self, part: Part, where: Where) -> Float[Tensor, "head row 1"] | None:
        """The logit scale of a tile's rows, in the order of the tile."""
        return None if part.factor is None else self.turned(part.factor[where.run, where.rows, None])

    def tile_in_steps(self, where: Where) -> tuple[Tensor, Tensor]:
        """Content and the sum of content and bias of the tile that was last asked for."""
        content = buffer(self.content, where)
        return content, content if self.call.bias is None else buffer(self.raw, where)


class _Spans:
    """Which keys a block of rows has to visit, and the mask of a tile where it has one."""

    def __init__(self, visibility: Visibility, rows: int) -> None:
        layout = visibility.layout
        if visibility.bands:
            query_index, key_index = layout.indices()
            visibility = replace(visibility, layout=replace(layout, query_index=query_index, key_index=key_index))
        self.rows = rows
        self.sequences = [visibility.sequence(number) for number in range(layout.batch)]
        begin, end, unbroken = (_split(x, rows) for x in visibility.spans())
        # A row that sees nothing has an empty span behind all keys.
        self.low = _columns_of([x.amin(1) for x in begin])
        self.high = _columns_of([_last(*x) for x in zip(begin, end, strict=True)])
        self.inner_low = _columns_of([x.amax(1) for x in begin])
        self.inner_high = _columns_of([x.amin(1) for x in end])
        self.unbroken = _columns_of([x.all(1) for x in unbroken])

    def outer(self, batch: int, block: int) -> tuple[int, int]:
        """Outside of it the rows of a block see nothing."""
        row = _row(self.low, batch)
        return row[block], max(_row(self.high, batch)[block], row[block])

    def mask(self, where: Where) -> Bool[Tensor, "#head row column"] | None:
        """True where a row may see a column, for the last columns alone where the others are visible; None for all."""
        own = self.sequences[where.batch if len(self.sequences) > 1 else 0]
        block, columns = where.rows.start // self.rows, where.columns
        padding = own.layout.key_mask
        solid = own.layout.mask is None and (padding is None or bool(padding[0, columns].all()))
        if (
            solid
            and _row(self.unbroken, where.batch)[block]
            and _row(self.inner_low, where.batch)[block] <= columns.start
        ):
            columns = slice(max(columns.start, _row(self.inner_high, where.batch)[block]), columns.stop)
            if columns.start >= columns.stop:
                return None
        mask = own.mask(where.rows, columns)[0]
        return mask[where.absolute] if mask.shape[0] > 1 else mask


def _split(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    return x.split(rows, 1) if x.shape[1] else ()


def _last(begin: Tensor, end: Tensor) -> Tensor:
    return end.where(end > begin, 0).amax(1)


def _columns_of(blocks: list[Tensor]) -> list[list[int]]:
    """Numbers by sequence and block."""
    numbers: list[list[int]] = torch.stack(blocks, 1).tolist() if blocks else []
    return numbers


def _row(rows: list[list[int]], batch: int) -> list[int]:
    return rows[batch if len(rows) > 1 else 0]


def buffer(flat: Tensor, where: Where) -> Float[Tensor, "head row column"]:
    """The beginning of a flat piece of memory in the shape of a tile."""
    return flat[: math.prod(where.shape)].view(where.shape)


def tile_sizes(call: AttentionCall, *, whole: bool) -> tuple[int, int, int]:
    """Rows, columns and heads of a tile."""
    return (ROWS, max(COLUMNS // 2, 1), call.heads) if whole else (ROWS, COLUMNS, min(HEADS, call.heads))
