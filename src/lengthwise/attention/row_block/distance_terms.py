"""A DistanceBias in tiles: as views of one strip where positions follow the slots, else gathered.

With rows backwards in time, row r and column c of a tile need strip[r + c]: a Hankel view of one vector per head, no
copy, with -inf where causality and window forbid. Its gradient is a sum along diagonals: written into a buffer whose
rows are one longer, the diagonals become columns.
"""

import math

import torch
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.terms import LOG2E, Term, Where
from lengthwise.attention.row_block.visible import Visible
from lengthwise.bias import DistanceBias, at_least_float32


class StripTerm(Term):
    """bias[i, j] = strip[last slot - slot i + j]."""

    flip = True
    knows_order = True

    def __init__(self, bias: DistanceBias, visible: Visible, offsets: list[int], dtype: torch.dtype) -> None:
        call = visible.call
        self.bias, self.visible, self.offsets = bias, visible, offsets
        self.last = visible.start + call.queries - 1
        table = at_least_float32(bias.table).to(dtype) * LOG2E
        distance = self.last - torch.arange(call.queries + call.keys - 1, device=table.device)
        forbidden = torch.zeros_like(distance, dtype=torch.bool)
        if call.causal:
            forbidden |= distance < 0
        if call.window is not None:
            forbidden |= distance.abs() >= call.window
        columns = [(distance + (offset - bias.first)).clamp(0, table.shape[1] - 1) for offset in offsets]
        self.strip = torch.stack([table[:, column].masked_fill(forbidden, -math.inf) for column in columns])
        self.learned = bias.table.requires_grad
        self.d_strip = torch.zeros_like(self.strip) if self.learned else self.strip
        self.highest: Tensor | None = None
        self.skew = self.strip.new_zeros(0)
        self.skew_shape: tuple[int, ...] = ()

    def tile(self, where: Where) -> Tensor:
        """A view of the strip."""
        strip = self.strip[self._batch(where.batch), where.absolute]
        return strip.as_strided(where.shape, (strip.stride(0), 1, 1), strip.storage_offset() + self._begin(where))

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """The entry of distance 0 in slots, the same for all rows."""
        at = min(self.last, self.strip.shape[2] - 1)
        return self.strip[self._batch(batch), heads, at : at + 1].clamp(min=-1e4).expand(-1, len(slots))

    @property
    def fall(self) -> float:
        """From the largest entry to the smallest."""
        table = self.bias.table.detach()
        return float(table.amax() - table.amin())

    def own_bias(self, call: Call) -> Tensor:
        """The entry of distance 0 in slots."""
        return self.strip[:, :, self.last, None].expand(-1, -1, call.queries)

    def ceiling(self, rows: slice, width: int, count: int) -> Tensor:
        """The largest entry at the nearest key's distance or beyond."""
        if self.highest is None:
            self.highest = self.strip.cummax(-1).values
        first, last = self.visible.slots(rows)
        slots = torch.arange(first, last, device=self.strip.device)
        ends = torch.arange(1, count + 1, device=self.strip.device) * width - 1
        return self.highest[:, :, (self.last - slots[:, None] + ends).clamp(max=self.strip.shape[2] - 1)]

    def landing(self, weights: Tensor) -> Tensor:
        """Rows of a longer buffer, each one further to the right."""
        if not self.learned:
            return weights
        heads, rows, columns = weights.shape
        if self.skew_shape != (heads, rows, columns):
            size = heads * rows * (columns + rows)
            if self.skew.numel() < size:
                self.skew = self.skew.new_zeros(size)
            self.skew[:size].zero_()
            self.skew_shape = (heads, rows, columns)
        return self.skew.as_strided(weights.shape, (rows * (columns + rows), columns + rows + 1, 1))

    def collect(self, where: Where, d_scores: Tensor) -> None:
        """Sums along the diagonals."""
        if not self.learned:
            return
        heads, rows, columns = where.shape
        sums = self.skew[: heads * rows * (columns + rows)].view(heads, rows, columns + rows).sum(1)
        begin = self._begin(where)
        self.d_strip[self._batch(where.batch), where.absolute, begin : begin + columns + rows - 1] += sums[:, :-1]

    def gradients(self) -> list[Tensor | None]:
        """The table's gradient."""
        if not self.learned:
            return [None, None, None]
        count = self.bias.table.shape[1]
        d_table = self.strip.new_zeros(self.bias.table.shape)
        for offset, strip in zip(self.offsets, self.d_strip, strict=True):
            top = self.last + offset - self.bias.first  # the column that strip[0] is made of, before clamping
            beyond = min(max(top - count + 1, 0), strip.shape[1])
            inside = max(min(top + 1, strip.shape[1]), beyond)
            d_table[:, top - inside + 1 : top - beyond + 1] += strip[:, beyond:inside].flip(1)
            d_table[:, -1] += strip[:, :beyond].sum(1)
            d_table[:, 0] += strip[:, inside:].sum(1)
        return [d_table.to(self.bias.table.dtype), None, None]

    def _begin(self, where: Where) -> int:
        return self.last - (self.visible.slots(where.rows)[1] - 1) + where.columns.start

    def _batch(self, batch: int) -> int:
        return batch if len(self.offsets) > 1 else 0


class GatherTerm(Term):
    """bias[i, j] = table[query[i] - key[j]], for positions with gaps."""

    def __init__(self, bias: DistanceBias, dtype: torch.dtype) -> None:
        self.bias = bias
        self.table = at_least_float32(bias.table).to(dtype) * LOG2E
        self.learned = bias.table.requires_grad
        self.d_table = torch.zeros_like(self.table)

    def tile(self, where: Where) -> Tensor:
        """Gathered."""
        return self.table[where.absolute][:, self._index(where.batch, where.rows, where.columns)]

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """Gathered."""
        query, key = (x[batch if x.shape[0] > 1 else 0] for x in (self.bias.query, self.bias.key))
        index = (query - key[slots] - self.bias.first).clamp(0, self.table.shape[1] - 1)
        return self.table[heads][:, index].clamp(min=-1e4)

    def collect(self, where: Where, d_scores: Tensor) -> None:
        """Scattered, one head after the other, so that the order of the sums is always the same."""
        if self.learned:
            index = self._index(where.batch, where.rows, where.columns).flatten().expand(d_scores.shape[0], -1)
            self.d_table[where.absolute].scatter_add_(1, index, d_scores.flatten(1))

    def gradients(self) -> list[Tensor | None]:
        """The table's gradient."""
        return [self.d_table.to(self.bias.table.dtype) if self.learned else None, None, None]

    def _index(self, batch: int, rows: slice, columns: slice) -> Tensor:
        query, key = (x[batch if x.shape[0] > 1 else 0] for x in (self.bias.query, self.bias.key))
        return (query[rows, None] - key[columns] - self.bias.first).clamp(0, self.table.shape[1] - 1)


def distance_term(bias: DistanceBias, visible: Visible, dtype: torch.dtype) -> Term:
    """The strip if it can be had."""
    offsets = slot_offsets(bias, visible)
    return GatherTerm(bias, dtype) if offsets is None else StripTerm(bias, visible, offsets, dtype)


def slot_offsets(bias: DistanceBias, visible: Visible) -> list[int] | None:
    """By how much distances in positions exceed distances in slots, one number per sequence or one for all.

    None unless that holds for every pair that may meet: padding and the pairs of different documents do not count.
    """
    call = visible.call
    device = bias.query.device
    key = bias.key - torch.arange(call.keys, device=device)
    query = bias.query - torch.arange(visible.start, visible.start + call.queries, device=device)
    parts = [key, query, *(x for x in (call.key_mask, call.documents) if x is not None)]
    offsets = []
    for batch in range(max(part.shape[0] for part in parts)):
        of_key, of_query = (x[batch if x.shape[0] > 1 else 0] for x in (key, query))
        if call.documents is not None:
            documents = call.documents[batch if call.documents.shape[0] > 1 else 0]
            own = _relative_to_document(of_key, of_query, documents, visible)
            if own is None:
                return None
            of_key, of_query = own
        seen = torch.ones_like(of_key, dtype=torch.bool)
        if call.key_mask is not None:
            seen = call.key_mask[batch if call.key_mask.shape[0] > 1 else 0]
        if not seen.any():
            offsets.append(0)
            continue
        first = int(seen.nonzero()[0])
        of_key = of_key[seen]
        of_query = of_query[max(first - visible.start, 0) :] if call.causal else of_query
        if not (of_key == of_key[0]).all() or (len(of_query) and not (of_query == of_query[0]).all()):
            return None
        offsets.append(int(of_query[0] - of_key[0]) if len(of_query) else 0)
    return offsets[:1] if len(set(offsets)) == 1 else offsets


def _relative_to_document(
    key: Tensor, query: Tensor, documents: Tensor, visible: Visible
) -> tuple[Tensor, Tensor] | None:
    """Offsets less the offset of the first key in the same document; None if a document is in more than one piece."""
    if visible.start < 0 or visible.start + len(query) > len(documents):
        return None
    new = torch.ones_like(documents, dtype=torch.bool)
    new[1:] = documents[1:] != documents[:-1]
    if int(new.sum()) != len(documents.unique()):
        return None
    first = key[new][new.cumsum(0) - 1]
    return key - first, query - first[visible.start : visible.start + len(query)]
