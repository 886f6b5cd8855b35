"""Which keys each query may see: causality, window, bands, documents, padding and an explicit mask, together.

A tile of the mask is filled in where a backend needs one. Everything longer is linear in length and reads nothing
back: keys are sorted by document, in which a query's keys are one interval for every band.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lengthwise.token_layout import Band, TokenLayout

Intervals = tuple[Int[Tensor, "band #batch query"], Int[Tensor, "band #batch query"]]
"""From `low` up to `high`, one interval for every band; they do not overlap."""

PER_SEQUENCE = (
    *("query", "key", "query_mask", "key_mask", "query_documents", "key_documents"),
    *("mask", "query_index", "key_index"),
)
"""The tensors of a layout; the first axis of each is the batch, or 1."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """The masks of one call."""

    layout: TokenLayout
    window: int | None = None
    bands: tuple[Band, ...] = ()

    @property
    def hides(self) -> bool:
        """Whether any query may be barred from any key."""
        ordered = self.layout.causal and self.layout.query_count > 1
        return ordered or not self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether order in the tensor is all that masks, and the queries are the last keys."""
        return self.layout.is_plain and self.window is None and not self.bands

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key; an explicit mask decides that by itself."""
        return self.layout.causal and self.layout.mask is None

    def mask(self, rows: slice = slice(None), columns: slice = slice(None)) -> Bool[Tensor, "#batch #head row column"]:
        """True where a query may see a key."""
        layout = self.layout
        query = layout.query_slots()[rows][:, None]
        key = torch.arange(layout.key_count, device=query.device)[columns]
        visible = torch.ones(1, query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)
        if self.is_causal:
            visible = visible & (key <= query)
        if self.window is not None:
            visible = visible & (query - key < self.window) & (key - query < self.window)
        if self.bands:
            visible = visible & self._in_bands(rows, columns)
        if layout.query_documents is not None and layout.key_documents is not None:
            visible = visible & (layout.query_documents[:, rows, None] == layout.key_documents[:, None, columns])
        if layout.key_mask is not None:
            visible = visible & layout.key_mask[:, None, columns]
        if layout.mask is None:
            return visible[:, None]
        return visible[:, None] & layout.mask[:, :, rows, columns]

    def _in_bands(self, rows: slice, columns: slice) -> Bool[Tensor, "#batch row column"]:
        query, key = self.layout.indices()
        query, key = query[:, rows, None], key[:, None, columns]
        inside = torch.zeros((), dtype=torch.bool, device=query.device)
        for band in self.bands:
            distance = query.div(band.chunk, rounding_mode="floor") - key.div(band.chunk, rounding_mode="floor")
            own = distance >= band.nearest
            if band.farthest is not None:
                own = own & (distance < band.farthest)
            if band.first is not None:
                own = own & (key < band.first)
            inside = inside | own
        return inside

    def intervals(self) -> tuple[Int[Tensor, "#batch key"] | None, Intervals]:
        """The keys sorted by document, None for as they are, and what each query sees of them; padding included.

        An explicit mask is not: whoever asks must look at it apart.
        """
        layout = self.layout
        slots, keys = layout.query_slots()[None], layout.key_count
        order = ordinal = None
        low, high = torch.zeros_like(slots), torch.full_like(slots, keys)
        if keys == 0:
            return None, (low[None], high[None])
        if layout.key_documents is not None and layout.query_documents is not None:
            documents, order = layout.key_documents.sort(dim=1, stable=True)
            own = layout.query_documents.contiguous()
            rows = layout.batch
            documents, own = (x.expand(rows, -1).contiguous() for x in (documents, own))
            order = order.expand(rows, -1)
            low, high = (torch.searchsorted(documents, own, right=right) for right in (False, True))
            ordinal = torch.zeros_like(documents, dtype=torch.int64)
            ordinal[:, 1:] = (documents[:, 1:] != documents[:, :-1]).cumsum(1)
        begin = low
        if self.is_causal or self.window is not None:
            last = slots + 1 if self.is_causal else torch.full_like(slots, keys)
            first = torch.zeros_like(slots)
            if self.window is not None:
                first, last = slots - self.window + 1, torch.minimum(last, slots + self.window)
            ends = [self._place(end.clamp(0, keys), order, ordinal, begin) for end in (first, last)]
            low, high = torch.maximum(low, ends[0]), torch.minimum(high, ends[1])
        if not self.bands:
            return order, (low[None], high[None])
        query, key = layout.indices()
        number = key if order is None else key.expand(order.shape[0], -1).gather(1, order)
        lows, highs = [], []
        for band in self.bands:
            chunk = query.div(band.chunk, rounding_mode="floor")
            last = (chunk - band.nearest + 1) * band.chunk
            last = last if band.first is None else last.clamp(max=band.first)
            first = torch.zeros_like(last) if band.farthest is None else (chunk - band.farthest + 1) * band.chunk
            ends = [self._place(end.clamp(min=0), number, ordinal, begin) for end in (first, last)]
            lows.append(torch.maximum(low, ends[0]))
            highs.append(torch.minimum(high, ends[1]))
        return order, _disjoint(torch.stack(lows), torch.stack(highs))

    def _place(
        self,
        wanted: Int[Tensor, "#batch query"],
        rising: Int[Tensor, "#batch key"] | None,
        ordinal: Int[Tensor, "batch key"] | None,
        begin: Int[Tensor, "#batch query"],
    ) -> Int[Tensor, "#batch query"]:
        """The first place of each query's document where `rising` is as wanted or more; without one it is the slot."""
        if rising is None:
            return wanted
        if ordinal is None:
            rows = max(rising.shape[0], wanted.shape[0])
            return torch.searchsorted(rising.expand(rows, -1).contiguous(), wanted.expand(rows, -1).contiguous())
        # Documents one after the other, far apart, make one rising row of all of them.
        room = self.layout.key_count + self.layout.query_count + int(1e9)
        own = ordinal.gather(1, begin.clamp(max=ordinal.shape[1] - 1))
        rows = max(ordinal.shape[0], rising.shape[0], wanted.shape[0])
        return torch.searchsorted(
            (rising + ordinal * room).expand(rows, -1).contiguous(), (wanted + own * room).expand(rows, -1).contiguous()
        )

    def spans(self) -> tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch query"], Bool[Tensor, "#batch query"]]:
        """The first key that each query may see, the one behind its last, and whether it sees all between them.

        Neither padding nor an explicit mask is looked at. What sees nothing has an empty span.
        """
        order, (low, high) = self.intervals()
        count = (high - low).clamp(min=0)
        first, last = low, high
        if order is not None:
            first, last = (_picked(order, end.clamp(0, order.shape[1] - 1)) for end in (low, high - 1))
            last = last + 1
        begin = first.where(count > 0, self.layout.key_count).amin(0)
        end = torch.maximum(last.where(count > 0, 0).amax(0), begin)
        return begin, end, count.sum(0) == end - begin

    def sequence(self, number: int) -> "Visibility":
        """That of one sequence alone."""
        own = {
            name: part[number : number + 1]
            for name in PER_SEQUENCE
            if (part := getattr(self.layout, name)) is not None and part.shape[0] > 1
        }
        return replace(self, layout=replace(self.layout, **own, facts=None))

    def seen(self, some: Bool[Tensor, "batch #kv_head key"] | None = None) -> Int[Tensor, "#batch #kv_head query"]:
        """How many keys, or of `some` of them, each query sees; linear but under an explicit mask."""
        layout = self.layout
        if some is None:
            some = torch.ones(1, 1, layout.key_count, dtype=torch.bool, device=layout.key.device)
        if layout.mask is not None:
            return (self.mask() & some[:, :, None]).sum(-1)
        if layout.key_mask is not None:
            some = some & layout.key_mask[:, None]
        order, (low, high) = self.intervals()
        if order is not None:
            rows = max(order.shape[0], some.shape[0])
            some = some.expand(rows, -1, -1).gather(2, order[:, None].expand(rows, some.shape[1], -1))
        counted = torch.nn.functional.pad(some.cumsum(-1), (1, 0))
        rows = max(counted.shape[0], low.shape[1])
        counted = counted.expand(rows, -1, -1)
        total = torch.zeros((), dtype=torch.int64, device=counted.device)
        for first, last in zip(low, high, strict=True):
            ends = [end[:, None].expand(rows, counted.shape[1], -1) for end in (last.maximum(first), first)]
            total = total + counted.gather(2, ends[0]) - counted.gather(2, ends[1])
        return total


def visible_counts(layout: TokenLayout, window: int | None = None) -> Int[Tensor, "#batch #head query"]:
    """How many keys each query may see: real tokens of its own document, up to itself if causal, within a window.

    At least 1, for queries that are padding. What a cache has dropped or not yet filled makes no difference.
    """
    if layout.ring is not None:
        return visible_counts(layout.whole, window).index_select(2, layout.ring.slots)
    ordered = layout.causal and layout.mask is None
    if ordered and (window is None or not layout.counts_tokens):
        behind = (layout.indices()[0] + 1).clamp(min=1)[:, None]
        return behind if window is None else behind.clamp(max=window)
    return Visibility(layout, window).seen().clamp(min=1)


def _picked(order: Int[Tensor, "batch key"], place: Int[Tensor, "band batch query"]) -> Tensor:
    return order.expand(place.shape[0], -1, -1).gather(2, place)


def _disjoint(low: Tensor, high: Tensor) -> Intervals:
    """Intervals in rising order, each from where the ones before it end."""
    if low.shape[0] == 1:
        return low, high
    low, order = low.sort(0)
    high = high.gather(0, order)
    reached = high.cummax(0).values
    low = torch.cat([low[:1], torch.maximum(low[1:], reached[:-1])])
    return low, high
