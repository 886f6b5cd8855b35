"""A captured layer summarised as maps, block by block: described forms, tiles, profiles and the two spreads."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.inspect.diagonals import Diagonals, MaskPiece, uniform_profile
from lengthwise.inspect.rotary import rotary_kernel
from lengthwise.inspect.scores import BlockMask, ScoreBlock, bias_block, score_blocks, weights_of
from lengthwise.model.families import AttentionRecord
from lengthwise.views.maps import LayerMap, What
from lengthwise.views.tiles import TilePool, Tiles, blocks

Shown = Literal["first", "mean"]

CACHED = 2**19
"""How many numbers of a block are computed at once: little enough for one core's cache."""


@dataclass(frozen=True)
class MapOptions:
    """How maps are kept: that of the first sequence or the mean, with at most `resolution` tiles along a side."""

    shown: Shown
    resolution: int


def layer_maps(record: AttentionRecord, whats: Collection[What], options: MapOptions) -> dict[What, LayerMap]:
    """The maps of one layer; everything that needs blocks shares one walk over them."""
    maps: dict[What, LayerMap] = {}
    described = _described_map(record, options) if "bias" in whats else None
    if described is not None:
        maps["bias"] = described
    waiting = [what for what in whats if what not in maps]
    pool = 1 if set(waiting) <= {"profile"} else -(-max(record.shape[2:]) // options.resolution)
    spans = list(blocks(record.shape, pool, causal=record.causal)) if waiting else []
    groups = _head_groups(record, spans[0][0].stop) if spans else ()
    # A profile is that of the scores, without their tiles.
    builders = {
        what: MapBuilder(record, what, options, pool, groups if what in waiting else ())
        for what in dict.fromkeys("scores" if what == "profile" else what for what in waiting)
    }
    # A bias needs no queries and keys, unless a rescore makes it or a factor scales it.
    alone = set(builders) == {"bias"} and record.rescore is None and record.logit_scale is None
    for rows, columns in spans:
        visible = BlockMask.of(record, rows, columns)
        pieces = next(iter(builders.values())).diagonals.pieces(visible.mask, rows, columns)
        for block in (_bias_blocks if alone else score_blocks)(record, visible, groups):
            for builder in builders.values():
                builder.add(block, pieces)
    for what in waiting:
        maps[what] = builders["scores"].profile() if what == "profile" else builders[what].finish()
    return {what: maps[what] for what in whats}


class MapBuilder:
    """One map, while blocks are added to it."""

    def __init__(
        self, record: AttentionRecord, what: What, options: MapOptions, pool: int, groups: tuple[slice, ...]
    ) -> None:
        self.record, self.what, self.shown, self.pool = record, what, options.shown, pool
        _, heads, queries, keys = record.shape
        self.described = None
        if what == "bias" and _is_described(record, options.shown):
            assert record.bias is not None
            self.described = record.bias.first_sequence()
        sizes = [] if self.described is not None else [group.stop - group.start for group in groups]
        self.tiles = [TilePool(size, queries, keys, pool) for size in sizes]
        self.groups = {group.start: place for place, group in enumerate(groups)}
        self.diagonals = Diagonals(record.shape, causal=record.causal)
        self.variance = torch.zeros(heads, dtype=torch.float64)
        self.pairs = 0

    def add(self, block: ScoreBlock, pieces: list[MaskPiece]) -> None:
        """Take in some rows of some heads."""
        x, visible, heads = self._values(block), block.visible, block.heads
        self.diagonals.add(x, pieces, heads)
        if self.tiles:
            shown = _single_map(x, visible.mask, self.shown)
            self.tiles[self.groups[heads.start]].add(*shown, visible.rows, visible.columns)
        if x.shape[0] > 1:
            self.variance[heads] += _summed_variance(x, visible.mask)
            self.pairs += int(visible.mask.all(0).sum()) if heads.start == 0 else 0

    def finish(self) -> LayerMap:
        """The map of all blocks."""
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
            tiles=_joined([tiles.done() for tiles in self.tiles]),
            profile=self.diagonals.profile(),
            context_dependence=dependence,
            diagonal_spread=self.diagonals.spread(),
        )

    def profile(self) -> LayerMap:
        """The same without a map of pairs, and with the kernel of rotary heads."""
        return replace(self.finish(), tiles=None, kernel=rotary_kernel(self.record))

    def _values(self, block: ScoreBlock) -> Float[Tensor, "batch head row column"]:
        if self.what == "bias":
            assert block.bias is not None
            return block.bias.expand(self.record.shape[0], -1, -1, -1)
        if self.what == "content":
            return block.content
        return weights_of(self.record, block) if self.what == "weights" else block.scores


def bias_map(bias: Bias, layer: int, *, causal: bool) -> LayerMap | None:
    """The map of a bias that depends on distance alone, which needs no walk over blocks; None for any other."""
    profile = uniform_profile(bias, causal=causal)
    if profile is None:
        return None
    _, heads, queries, keys = bias.shape
    zeros = torch.zeros(heads)
    return LayerMap(layer, queries, keys, causal, bias.first_sequence(), None, profile, zeros, zeros.clone())


def _described_map(record: AttentionRecord, options: MapOptions) -> LayerMap | None:
    if not record.context_free or record.bias is None or record.bias.shape[1] != record.shape[1]:
        return None
    if not _is_described(record, options.shown):
        return None
    return bias_map(record.bias, record.layer, causal=record.causal)


def _is_described(record: AttentionRecord, shown: Shown) -> bool:
    """Whether the described bias of the first sequence is what is shown."""
    bias = record.bias
    if bias is None or record.rescore is not None or record.logit_scale is not None:
        return False
    return bias.is_compact and (bias.shape[0] == 1 or shown == "first")


def _head_groups(record: AttentionRecord, rows: int) -> tuple[slice, ...]:
    """Heads that are computed together; all of them where a rescore or a mask has them together."""
    batch, heads, _, keys = record.shape
    first = slice(0, 1)
    if record.rescore is not None or record.mask(first, first).shape[1] > 1:
        return (slice(0, heads),)
    size = max(1, CACHED // (batch * rows * keys))
    # A group has all heads of some keys, or some heads of one.
    group = heads // record.k.shape[1]
    size = size - size % group if size >= group else next(n for n in range(size, 0, -1) if group % n == 0)
    return tuple(slice(start, min(start + size, heads)) for start in range(0, heads, size))


def _bias_blocks(record: AttentionRecord, visible: BlockMask, groups: tuple[slice, ...]) -> Iterator[ScoreBlock]:
    bias = bias_block(record, visible)
    assert bias is not None
    for heads in groups:
        yield ScoreBlock(visible, heads, bias[:, heads], bias[:, heads], bias[:, heads])


def _single_map(
    x: Float[Tensor, "batch head row column"], mask: Bool[Tensor, "#batch 1 row column"], shown: Shown
) -> tuple[Float[Tensor, "head row column"], Bool[Tensor, "row column"]]:
    """The first sequence, or the mean over those that see a key; x is 0 where they do not."""
    if shown == "first" or x.shape[0] == 1:
        return x[0], mask[0, 0]
    mask = mask.expand(x.shape[0], -1, -1, -1)
    return x.sum(0) / mask.sum(0).clamp(min=1), mask.any(0)[0]


def _summed_variance(
    x: Float[Tensor, "batch head row column"], mask: Bool[Tensor, "#batch 1 row column"]
) -> Float[Tensor, " head"]:
    """The variance over sequences, summed over the pairs that all of them see; x is 0 where they do not."""
    count = x.shape[0]
    # About the first sequence: sum e^2 - (sum e)^2 / n is as exact as about the mean where n is small.
    away = x[1:] - x[0]
    if mask.shape[0] > 1:
        away.masked_fill_(~mask.all(0), 0)
    total = away.sum(0) if count > 2 else away[0]
    squares = sum(_squares(part) for part in away) - _squares(total) / count
    return squares.clamp(min=0).cpu() / (count - 1)


def _squares(x: Float[Tensor, "head row column"]) -> Float[Tensor, " head"]:
    """The sum of squares of every head."""
    return torch.stack([torch.dot(head, head) for head in x.flatten(1)]).double()


def _joined(parts: list[Tiles]) -> Tiles | None:
    """The tiles of all heads."""
    if len(parts) < 2:
        return parts[0] if parts else None
    mean, least, greatest = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "least", "greatest")
    )
    return Tiles(parts[0].pool, mean, least, greatest)
