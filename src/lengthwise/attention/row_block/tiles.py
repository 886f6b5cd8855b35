"""Attention in tiles: a block of rows meets a span of keys, forward and backward, and nothing larger is ever alive.

    scores  = scale q k^T + bias - shift      one product: the shift, and a level's bias, ride in extra channels
    weights = 2^scores                        all scores are in units of log 2, because exp2 is the cheaper of the two
    out     = weights v / sum(weights)

The shift is a row's score on itself, known beforehand: any number will do that keeps 2^scores within float32's range.
Rows for which it did not are done again with their largest score, and only those, so that no row depends on a later
one. Backward the shift is the log-sum-exp, and the same product gives the weights themselves.
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
from lengthwise.bias import wide

ROWS, COLUMNS, HEADS = 128, 512, 6
"""The largest tile: HEADS times ROWS x COLUMNS scores, small enough for the cache, large enough for the product."""

SMALLEST_SUM = 2.0**-100
"""A sum of weights below it may have lost some to underflow."""

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


class Engine:
    """One call, cut in tiles."""

    def __init__(self, call: Call, term: Term, firsts: Firsts) -> None:
        self.call, self.term, self.firsts = call, term, firsts
        self.visible = Visible(call)
        self.dtype, self.device = wide(call.q).dtype, call.q.device
        self.rows, self.columns, self.heads = sizes(call, whole=term.whole)
        tile = self.heads * min(self.rows, call.queries) * min(self.columns, call.keys)
        self.first, self.second = (torch.empty(tile, dtype=self.dtype, device=self.device) for _ in range(2))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of every row in units of log 2; inf where a row sees nothing."""
        call = self.call
        out = torch.zeros(call.batch, call.heads, call.queries, call.v.shape[3], dtype=self.dtype, device=self.device)
        lse = torch.full(out.shape[:3], math.inf, dtype=self.dtype, device=self.device)
        for parts in self._bundles():
            shifts = [own_scores(self.visible, self.term, part) for part in parts]
            for index, rows in enumerate(row_blocks(call, self.rows)):
                asked = [shift[:, rows] for shift in shifts]
                found = self._rows_forward(parts, index, rows, asked)
                for part, shift, (sums, block) in zip(parts, asked, found, strict=True):
                    good = (sums > SMALLEST_SUM) & (sums < math.inf) & block.isfinite().all(-1)
                    if not good.all():
                        shift, sums, block = self._again(part, index, rows, good, (shift, sums, block))
                    dead = sums == 0
                    lse[part.batch, part.heads, rows] = (shift + sums.log2()).masked_fill(dead, math.inf)
                    out[part.batch, part.heads, rows] = block / sums.masked_fill(dead, 1)[..., None]
        return out, lse

    def _rows_forward(
        self, parts: list[Part], index: int, rows: slice, shifts: list[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The sum of weights and the weighted sum of values for a block of rows of every part."""
        asked = [self._queries(part, rows, shift) for part, shift in zip(parts, shifts, strict=True)]
        sums = [torch.zeros(q.shape[:2], dtype=self.dtype, device=self.device) for q in asked]
        blocks = [q.new_zeros(*q.shape[:2], self.call.v.shape[3]) for q in asked]
        for i, where in self._visits(parts, index, rows, asked):
            weights = self._scores(parts[i], where, asked[i]).exp2_()
            heads = where.run
            sums[i][heads] += weights.sum(-1)
            blocks[i][heads].baddbmm_(weights, parts[i].v[heads, where.columns, :-1])
        if self.term.flip:
            return [(total.flip(1), block.flip(1)) for total, block in zip(sums, blocks, strict=True)]
        return list(zip(sums, blocks, strict=True))

    def _again(
        self, part: Part, index: int, rows: slice, good: Tensor, fast: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that are not good done again, shifted by their largest score; the others as they were."""
        asked = self._queries(part, rows, torch.zeros_like(fast[0]))
        peak = torch.full_like(fast[0], -math.inf)
        for _, where in self._visits([part], index, rows, [asked]):
            heads = where.run
            largest = self._scores(part, where, asked).amax(-1)
            peak[heads] = torch.maximum(peak[heads], largest.flip(1) if self.term.flip else largest)
        shift = peak.masked_fill(peak == -math.inf, 0)
        ((sums, block),) = self._rows_forward([part], index, rows, [shift])
        return tuple(
            torch.where(good if x.ndim == 2 else good[..., None], x, y)
            for x, y in zip(fast, (shift, sums, block), strict=True)
        )  # type: ignore[return-value]

    def backward(self, d_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, per head even where heads share keys; the term has its own."""
        call, term = self.call, self.term
        d_q = torch.zeros(call.q.shape, dtype=self.dtype, device=self.device)
        d_k, d_v = (
            torch.zeros(call.batch, call.heads, *x.shape[2:], dtype=self.dtype, device=self.device)
            for x in (call.k, call.v)
        )
        wide_grad = term.channel_grad
        for parts in self._bundles():
            keys = [torch.zeros_like(part.k) if wide_grad else d_k[part.batch, part.heads] for part in parts]
            for index, rows in enumerate(row_blocks(call, self.rows)):
                asked = [self._queries(part, rows, lse[part.batch, part.heads, rows]) for part in parts]
                above = [self._upstream(part, rows, d_out, out) for part in parts]
                found = [
                    torch.zeros_like(q if wide_grad else q[..., : part.dim])
                    for q, part in zip(asked, parts, strict=True)
                ]
                for i, where in self._visits(parts, index, rows, asked):
                    part, heads, columns = parts[i], where.run, where.columns
                    weights = self._scores(part, where, asked[i])
                    weights.exp2_()
                    up = above[i][heads]
                    # Products go to contiguous memory first: only then does a batch of them run as one.
                    d_v[part.batch, part.heads][heads, columns] += torch.bmm(weights.transpose(1, 2), up[..., :-1])
                    d_weights = self._buffer(self.second, where)
                    torch.bmm(up, part.v[heads, columns].transpose(1, 2), out=d_weights)
                    d_scores = term.landing(weights)
                    torch.mul(weights, d_weights, out=d_scores)
                    width = part.dim + 2 if wide_grad and where.far else part.dim
                    found[i][heads, :, :width] += torch.bmm(d_scores, part.k[heads, columns, :width])
                    keys[i][heads, columns, :width] += torch.bmm(d_scores.transpose(1, 2), asked[i][heads, :, :width])
                    term.collect(where, d_scores)
                for part, block in zip(parts, found, strict=True):
                    d_q[part.batch, part.heads, rows] = (
                        block[..., : part.dim].flip(1) if term.flip else block[..., : part.dim]
                    )
                    if wide_grad:
                        term.collect_rows(
                            Where(part.batch, part.heads, slice(0, block.shape[0]), rows, rows, True),
                            block[..., part.dim :],
                        )
            for part, found_keys in zip(parts, keys, strict=True):
                if wide_grad:
                    d_k[part.batch, part.heads] = found_keys[..., : part.dim]
                    term.collect_keys(part.batch, part.heads, found_keys[..., part.dim + 1])
        return d_q.mul_(call.scale), d_k.div_(LOG2E), d_v

    def _bundles(self) -> Iterator[list[Part]]:
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
        q, (k, v) = wide(call.q[batch, heads]), (wide(x[batch, shared]) for x in (call.k, call.v))
        zero, one = q.new_zeros(*q.shape[:2], 1), k.new_ones(*k.shape[:2], 1)
        slope = self.term.slopes(batch, heads)
        q = torch.cat([q * (call.scale * LOG2E), zero, zero if slope is None else slope[..., None]], -1)
        return Part(batch, heads, q, torch.cat([k, one, torch.zeros_like(one)], -1), torch.cat([v, one], -1))

    def _queries(self, part: Part, rows: slice, shift: Tensor) -> Tensor:
        """A block of queries that carries its shift, backwards in time where the term wants it so."""
        q = part.q[:, rows].clone()
        q[..., part.dim] = -shift
        return q.flip(1) if self.term.flip else q

    def _upstream(self, part: Part, rows: slice, d_out: Tensor, out: Tensor) -> Tensor:
        """d_out, and in one more channel what the softmax takes from every weight's gradient: -d_out . out."""
        up = wide(d_out[part.batch, part.heads, rows])
        up = torch.cat([up, -(up * wide(out[part.batch, part.heads, rows])).sum(-1, keepdim=True)], -1)
        return up.flip(1) if self.term.flip else up

    def _visits(self, parts: list[Part], index: int, rows: slice, asked: list[Tensor]) -> Iterator[tuple[int, Where]]:
        """Every tile of a block of rows, nearest keys first: the part's number and the place."""
        batches = slice(parts[0].batch, parts[-1].batch + 1)
        low, high = self.visible.span(batches, rows)
        if self.firsts is not None:
            (part,) = parts
            low = max(
                low, min(self.firsts[part.batch][head][index] for head in range(part.heads.start, part.heads.stop))
            )
        own = max(low, min(high, self.visible.slots(rows)[0])) if self.term.splits else high
        near = [slice(max(own, at - self.columns), at) for at in range(high, own, -self.columns)]
        far = [slice(max(low, at - self.columns), at) for at in range(own, low, -self.columns)]
        for columns in near:
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, index, rows, columns, False))
        behind = False
        if far and self.term.splits:
            ((part, q),) = zip(parts, asked, strict=True)
            behind = self.term.aim(
                part.batch, part.heads, rows, slice(low, own), q[..., part.dim], part.k[..., part.dim + 1]
            )
        for columns in far:
            for i, part in enumerate(parts):
                yield from ((i, where) for where in self._runs(part, index, rows, columns, behind))

    def _runs(self, part: Part, index: int, rows: slice, columns: slice, far: bool) -> Iterator[Where]:
        """The neighbouring heads that keep something of a span of keys, together."""
        count = part.heads.stop - part.heads.start
        if self.firsts is None:
            yield Where(part.batch, part.heads, slice(0, count), rows, columns, far)
            return
        firsts = [self.firsts[part.batch][part.heads.start + head][index] for head in range(count)]
        head = 0
        while head < count:
            stop = head
            while stop < count and firsts[stop] < columns.stop:
                stop += 1
            if stop > head:
                begin = max(columns.start, min(firsts[head:stop]))
                yield Where(part.batch, part.heads, slice(head, stop), rows, slice(begin, columns.stop), far)
            head = stop + 1

    def _scores(self, part: Part, where: Where, q: Tensor) -> Tensor:
        """A tile of scores, less the shift that the queries carry."""
        width = part.dim + (2 if where.far else 1)
        q, k = q[where.run, :, :width], part.k[where.run, where.columns, :width].transpose(1, 2)
        scores = self._buffer(self.first, where)
        bias = self.term.tile(where)
        may = self.visible.mask(part.batch, where.rows, where.columns, order=not self.term.knows_order)
        if may is not None:
            may = may.flip(0) if self.term.flip else may
            bias = (q.new_zeros(()) if bias is None else bias).masked_fill(~may, -math.inf)
            bias = bias if bias.ndim == 3 else bias[None]
        if bias is None:
            return torch.bmm(q, k, out=scores)
        return torch.baddbmm(bias, q, k, out=scores)

    def _buffer(self, flat: Tensor, where: Where) -> Tensor:
        shape = where.shape
        return flat[: math.prod(shape)].view(shape)


def sizes(call: Call, *, whole: bool) -> tuple[int, int, int]:
    """Rows, columns and heads of a tile."""
    return (ROWS, max(COLUMNS // 2, 1), call.heads) if whole else (ROWS, COLUMNS, min(HEADS, call.heads))


def row_blocks(call: Call, rows: int) -> list[slice]:
    """The rows in blocks."""
    return [slice(row, min(row + rows, call.queries)) for row in range(0, call.queries, rows)]


def own_scores(visible: Visible, term: Term, part: Part) -> Float[Tensor, "head query"]:
    """Every row's score on the key in its own slot, in units of log 2; on the nearest key where there is none."""
    call = visible.call
    slots = torch.arange(visible.start, visible.start + call.queries, device=call.q.device).clamp(0, call.keys - 1)
    content = (part.q[..., : part.dim] * part.k[:, slots, : part.dim]).sum(-1)
    bias = term.diagonal(part.batch, part.heads, slots)
    return content if bias is None else content + bias
