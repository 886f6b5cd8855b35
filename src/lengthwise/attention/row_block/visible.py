"""Which keys a block of rows may see: the range worth visiting, and the mask of a tile where one is needed."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from lengthwise.attention.call import Call


@dataclass(frozen=True, eq=False)
class Visible:
    """The order, window, documents and padding of one call, asked block by block; `call.start` is a number here."""

    call: Call

    @cached_property
    def start(self) -> int:
        """The slot of the first query."""
        return int(self.call.start)

    def slots(self, rows: slice) -> tuple[int, int]:
        """The slots of some rows, from and up to."""
        return self.start + rows.start, self.start + rows.stop

    def span(self, batches: slice, rows: slice) -> tuple[int, int]:
        """The range of keys outside which these rows of these sequences see nothing; empty if they see none."""
        first, last = self.slots(rows)
        low, high = 0, self.call.keys
        if self.call.causal:
            high = min(high, last)
        if self.call.window is not None:
            low = max(low, first - self.call.window + 1)
            high = min(high, last - 1 + self.call.window)
        low, high = min(low, high), max(high, 0)
        if self.call.documents is None or low >= high:
            return low, high
        # A document that comes back later is not missed: the smallest and the largest number bound all of them.
        own = self._of(self.call.documents, batches)[:, max(first, 0) : last]
        keys = self._of(self.call.documents, batches)[:, low:high]
        shared = ((keys >= own.amin(1, keepdim=True)) & (keys <= own.amax(1, keepdim=True))).any(0).nonzero()
        return (low + int(shared[0]), low + int(shared[-1]) + 1) if len(shared) else (low, low)

    def mask(self, batch: int, rows: slice, columns: slice, *, order: bool) -> Bool[Tensor, "row column"] | None:
        """True where a row may see a column, or None where all may; without `order` it is known elsewhere."""
        call = self.call
        first, last = self.slots(rows)
        may: Tensor | None = None
        if order and self._crosses(first, last, columns):
            query = torch.arange(first, last, device=call.q.device)[:, None]
            key = torch.arange(columns.start, columns.stop, device=call.q.device)
            distance = query - key
            may = distance >= 0 if call.causal else torch.ones_like(distance, dtype=torch.bool)
            if call.window is not None:
                may = may & (distance.abs() < call.window)
        if call.documents is not None:
            documents = self._of(call.documents, slice(batch, batch + 1))[0]
            own, theirs = documents[first:last], documents[columns]
            if not (theirs == own[0]).all() or not (own == own[0]).all():
                same = own[:, None] == theirs
                may = same if may is None else may & same
        if call.key_mask is not None:
            seen = self._of(call.key_mask, slice(batch, batch + 1))[0, columns]
            if not seen.all():
                may = seen.expand(last - first, -1) if may is None else may & seen
        return may

    def _crosses(self, first: int, last: int, columns: slice) -> bool:
        """Whether order or window forbids anything in a tile."""
        window = self.call.window
        ahead = self.call.causal and columns.stop - 1 > first
        outside = window is not None and max(last - 1 - columns.start, columns.stop - 1 - first) >= window
        return ahead or outside

    def _of(self, x: Tensor, batches: slice) -> Tensor:
        return x if x.shape[0] == 1 else x[batches]


def rows_that_see(visible: Visible, some: Bool[Tensor, "batch kv_head key"]) -> Bool[Tensor, "batch kv_head query"]:
    """Whether a row may see any of some keys."""
    call = visible.call
    seen = torch.zeros(*some.shape[:2], call.queries, dtype=torch.bool, device=some.device)
    for batch in range(call.batch):
        for row in range(0, call.queries, 64):
            rows = slice(row, min(row + 64, call.queries))
            low, high = visible.span(slice(batch, batch + 1), rows)
            may = visible.mask(batch, rows, slice(low, high), order=True) if low < high else None
            own = some[batch, :, None, low:high]
            seen[batch, :, rows] = (own if may is None else own & may).any(-1)
    return seen
