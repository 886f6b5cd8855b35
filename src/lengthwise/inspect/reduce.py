"""A layer's record reduced to its maps, block by block: described forms, tiles, profiles and the two spreads."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.inspect.diagonals import Diagonals, uniform
from lengthwise.inspect.record import Block, Record
from lengthwise.views.maps import LayerMap, What
from lengthwise.views.tiles import TilePool, blocks

Shown = Literal["first", "mean"]


@dataclass(frozen=True)
class Wish:
    """How maps are to be kept: of the first sequence or the mean, with so many tiles along a side at most."""

    shown: Shown
    resolution: int


def layer_maps(record: Record, whats: Iterable[What], wish: Wish) -> dict[What, LayerMap]:
    """The maps of one layer; everything that needs blocks shares one walk over them."""
    found: dict[What, LayerMap] = {}
    makers: dict[What, Maker] = {}
    for what in whats:
        made = _described(record, wish) if what == "bias" else None
        if made is None:
            makers[what] = Maker(record, what, wish)
        else:
            found[what] = made
    if makers:
        # A bias needs no queries and keys, unless a rescore makes it.
        alone = set(makers) == {"bias"} and record.rescore is None
        pool = max(maker.pool for maker in makers.values())
        with _one_thread():
            for rows, columns in blocks(record.shape, pool, causal=record.causal):
                block = _bias_alone(record, rows, columns) if alone else record.block(rows, columns)
                for maker in makers.values():
                    maker.add(block, rows, columns)
    return found | {what: maker.done() for what, maker in makers.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Many short steps on small blocks: shared out to two threads they wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Maker:
    """One map in the making."""

    def __init__(self, record: Record, what: What, wish: Wish) -> None:
        self.record, self.what, self.shown = record, what, wish.shown
        _, heads, queries, keys = record.shape
        self.pool = 1 if what == "profile" else -(-max(queries, keys) // wish.resolution)
        self.described = None
        if what == "bias" and record.rescore is None and _one_for_all(record, wish.shown):
            assert record.bias is not None
            self.described = record.bias.first_sequence()
        keeps_tiles = what != "profile" and self.described is None
        self.tiles = TilePool(heads, queries, keys, self.pool) if keeps_tiles else None
        self.diagonals = Diagonals(record.shape, causal=record.causal)
        self.variance, self.pairs = torch.zeros(heads, dtype=torch.float64), 0

    def add(self, block: Block, rows: slice, columns: slice) -> None:
        """Take in some rows."""
        x = self._of(block)
        self.diagonals.add(x, block.may, rows, columns)
        if self.tiles is not None:
            self.tiles.add(*_shown(x, block.may, self.shown), rows, columns)
        if x.shape[0] > 1:
            all_may = block.may.all(0)
            self.variance += x.var(0).masked_fill_(~all_may, 0).sum((1, 2)).double().cpu()
            self.pairs += int(all_may.sum())

    def done(self) -> LayerMap:
        """The map."""
        record = self.record
        _, _, queries, keys = record.shape
        unknown = torch.full_like(self.variance, torch.nan).float()
        if self.what == "bias" and record.context_free and record.rescore is None:
            dependence = torch.zeros_like(unknown)
        else:
            dependence = (self.variance / self.pairs).sqrt().float() if self.pairs else unknown
        return LayerMap(
            layer=record.layer,
            queries=queries,
            keys=keys,
            causal=record.causal,
            described=self.described,
            tiles=None if self.tiles is None else self.tiles.done(),
            profile=self.diagonals.profile(),
            context_dependence=dependence,
            diagonal_spread=self.diagonals.spread(),
            kernel=record.rotated() if self.what == "profile" and record.rotated is not None else None,
        )

    def _of(self, block: Block) -> Float[Tensor, "batch head row column"]:
        if self.what == "bias":
            assert block.bias is not None
            return block.bias
        if self.what == "content":
            return block.content
        if self.what == "weights":
            return self.record.weights(block)
        return block.scores


def _described(record: Record, wish: Wish) -> LayerMap | None:
    """The map of a bias that depends on distance alone: nothing is walked over."""
    bias = record.bias
    if record.rescore is not None or not record.context_free or bias is None or not _one_for_all(record, wish.shown):
        return None
    profile = uniform(bias, causal=record.causal)
    if profile is None:
        return None
    _, heads, queries, keys = record.shape
    nothing = torch.zeros(heads)
    return LayerMap(
        record.layer, queries, keys, record.causal, bias.first_sequence(), None, profile, nothing, nothing.clone()
    )


def _one_for_all(record: Record, shown: Shown) -> bool:
    """Whether the described bias of the first sequence is what is to be shown."""
    assert record.bias is not None
    return record.bias.is_compact and (record.bias.shape[0] == 1 or shown == "first")


def _bias_alone(record: Record, rows: slice, columns: slice) -> Block:
    bias = record.bias_rows(rows, columns)
    return Block(record.mask(rows, columns), bias, bias, bias)


def _shown(
    x: Float[Tensor, "batch head row column"], may: Bool[Tensor, "#batch 1 row column"], shown: Shown
) -> tuple[Float[Tensor, "head row column"], Bool[Tensor, "row column"]]:
    """The first sequence, or the mean over those that may; x is 0 where they may not."""
    if shown == "first" or x.shape[0] == 1:
        return x[0], may[0, 0]
    may = may.expand(x.shape[0], -1, -1, -1)
    return x.sum(0) / may.sum(0).clamp(min=1), may.any(0)[0]
