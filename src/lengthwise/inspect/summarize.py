"""A captured layer summarised as maps, block by block: described forms, tiles, profiles and the two spreads."""

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias, at_least_float32
from lengthwise.inspect.diagonals import Diagonals, Piece, uniform_profile
from lengthwise.inspect.scores import BiasRows, BlockMask, ScoreBlock, rotary_kernel, score_block, weights_of
from lengthwise.model.families import AttentionRecord
from lengthwise.views.maps import LayerMap, Quantity
from lengthwise.views.tiles import TilePool, blocks, order

Shown = Literal["first", "mean"]

T = TypeVar("T")
ForEach = Callable[[Callable[[Any], Any], Iterable[Any]], object]
"""A loop: what to do, and with which items."""

CACHED = 2**19
"""How many numbers of a block are computed at once: little enough for one core's cache."""


@dataclass(frozen=True)
class MapOptions:
    """How maps are kept: that of the first sequence or the mean, with at most `resolution` tiles along a side."""

    shown: Shown
    resolution: int


def layer_maps(
    record: AttentionRecord, quantities: Collection[Quantity], options: MapOptions
) -> dict[Quantity, LayerMap]:
    """The maps of one layer; everything that needs blocks shares one walk over them."""
    maps: dict[Quantity, LayerMap] = {}
    described = _described_map(record, options) if "bias" in quantities else None
    if described is not None:
        maps["bias"] = described
    waiting = [quantity for quantity in quantities if quantity not in maps]
    if waiting:
        builders = _on_single_threads(partial(_walk, record, waiting, options))
        for quantity in waiting:
            maps[quantity] = builders["scores"].profile() if quantity == "profile" else builders[quantity].finish()
    return {quantity: maps[quantity] for quantity in quantities}


def _walk(
    record: AttentionRecord, quantities: Collection[Quantity], options: MapOptions, for_each: ForEach
) -> dict[Quantity, "MapBuilder"]:
    """Builders that all rows were added to."""
    pool = 1 if set(quantities) == {"profile"} else -(-max(record.shape[2:]) // options.resolution)
    spans = list(blocks(record.shape, pool, causal=record.causal))
    groups = _head_groups(record, spans[0][0].stop)
    # A profile is that of the scores, without their tiles.
    builders: dict[Quantity, MapBuilder] = {
        quantity: MapBuilder(record, quantity, options, pool if quantity in quantities else None)
        for quantity in dict.fromkeys("scores" if quantity == "profile" else quantity for quantity in quantities)
    }
    if "scores" in builders and "content" in builders and _only_shifts(record):
        builders["scores"].shifted_from(builders["content"])
    # A bias needs no queries and keys, unless a rescore makes it or a factor scales it.
    alone = set(builders) == {"bias"} and record.rescore is None and record.logit_scale is None
    bias_rows = BiasRows(record, spans[0][0].stop)
    for rows, columns in spans:
        visible = BlockMask.of(record, rows, columns)
        bias = bias_rows.block(visible)
        pieces = next(iter(builders.values())).diagonals.pieces(visible.mask, rows, columns)
        for builder in builders.values():
            builder.begin_rows(visible, pieces, bias)

        def add(heads: slice, visible: BlockMask = visible, bias: Tensor | None = bias) -> None:
            block = _bias_alone(visible, heads, bias) if alone else score_block(record, visible, heads, bias)
            for builder in builders.values():
                builder.add(block)

        for_each(add, groups)
        for_each(MapBuilder.end_rows, builders.values())
    return builders


def _on_single_threads(work: Callable[[ForEach], T]) -> T:
    """The result of some work, with a loop over items that runs on as many threads as torch has, each step on one.

    torch would share out every single operation instead: they are short, and its threads wait for each other longer
    than they work. How many it uses is each thread's own setting; torch keeps the last one for new threads too, so it
    is put back.
    """
    count = torch.get_num_threads()

    def without_gradients(step: Callable[..., T], *items: Any) -> T:
        with torch.no_grad():  # each thread's own setting as well
            return step(*items)

    if count == 1:
        return without_gradients(work, lambda step, items: [step(item) for item in items])
    # One thread more, for the work itself: it waits for the others.
    with ThreadPoolExecutor(count + 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return pool.submit(
                without_gradients,
                work,
                lambda step, items: list(pool.map(partial(without_gradients, step), items)),
            ).result()
        finally:
            torch.set_num_threads(count)


class MapBuilder:
    """One map, while rows are added to it; `pool` is the size of its tiles, None if it has none."""

    def __init__(self, record: AttentionRecord, quantity: Quantity, options: MapOptions, pool: int | None) -> None:
        self.record, self.quantity, self.shown = record, quantity, options.shown
        _, heads, queries, keys = record.shape
        self.described = None
        if quantity == "bias" and _is_described(record, options.shown):
            assert record.bias is not None
            self.described = record.bias.first_sequence()
        self.tiles = None
        if pool is not None and self.described is None:
            self.tiles = TilePool(heads, queries, keys, pool)
        self.diagonals = Diagonals(record.shape, causal=record.causal)
        self.variance, self.pairs = torch.zeros(heads, dtype=torch.float64), 0
        self._rows: Tensor | None = None
        self._content: MapBuilder | None = None

    def shifted_from(self, content: "MapBuilder") -> None:
        """Take the statistics of the content, which differ by the bias of each distance, and nothing twice."""
        self._content = content

    def begin_rows(self, visible: BlockMask, pieces: list[Piece], bias: Tensor | None) -> None:
        """Make room for some rows of all heads."""
        self.visible = visible
        height, heads, keys = visible.rows.stop - visible.rows.start, self.record.shape[1], self.record.shape[3]
        if self.tiles is not None and self._rows is None:
            # Made once, and wide enough for all: new memory costs more than the numbers that go into it.
            self._rows = torch.empty(heads, height, keys, device=self.record.q.device)
        if self._content is None:
            own = at_least_float32(self.record.q[:0])
            dtype = own.dtype if bias is None else torch.promote_types(own.dtype, bias.dtype)
            self.diagonals.begin_rows(pieces, height, own.to(dtype))

    def add(self, block: ScoreBlock) -> None:
        """Take in some heads of these rows; threads may add different heads at once."""
        if self._content is not None and self.tiles is None:
            return
        x, mask, heads = self._values(block), block.visible.mask, block.heads
        if self._rows is not None:
            self._rows[heads, : x.shape[2], : x.shape[3]] = _single_map(x, mask, self.shown)
        if self._content is None:
            self.diagonals.add(x, heads)
            if x.shape[0] > 1:
                self.variance[heads] += _summed_variance(x, mask)

    def end_rows(self) -> None:
        """Count these rows, now that all heads are there."""
        mask = self.visible.mask
        if self.tiles is not None and self._rows is not None:
            shown = mask[0, 0] if self.shown == "first" else mask.any(0)[0]
            rows = self._rows[:, : mask.shape[2], : mask.shape[3]]
            self.tiles.add(rows, shown, self.visible.rows, self.visible.columns)
        if self._content is None:
            self.diagonals.end_rows()
        self.pairs += int(mask.all(0).sum()) if self.record.shape[0] > 1 else 0

    def finish(self) -> LayerMap:
        """The map of all rows."""
        record, diagonals, variance = self.record, self.diagonals, self.variance
        if self._content is not None:
            profile = None if record.bias is None else uniform_profile(record.bias, causal=record.causal)
            assert profile is not None
            diagonals, variance = self._content.diagonals.shifted(profile), self._content.variance
        _, _, queries, keys = record.shape
        unknown = torch.full_like(variance, torch.nan).float()
        if self.quantity == "bias" and record.context_free and record.rescore is None:
            dependence = torch.zeros_like(unknown)
        else:
            dependence = (variance / self.pairs).sqrt().float() if self.pairs else unknown
        return LayerMap(
            layer=record.layer,
            queries=queries,
            keys=keys,
            causal=record.causal,
            described=self.described,
            tiles=None if self.tiles is None else self.tiles.done(),
            profile=diagonals.profile(),
            context_dependence=dependence,
            diagonal_spread=diagonals.spread(),
        )

    def profile(self) -> LayerMap:
        """The same without a map of pairs, and with the kernel of rotary heads."""
        return replace(self.finish(), tiles=None, kernel=rotary_kernel(self.record))

    def _values(self, block: ScoreBlock) -> Float[Tensor, "batch head row column"]:
        if self.quantity == "bias":
            assert block.bias is not None
            return block.bias.expand(self.record.shape[0], -1, -1, -1)
        if self.quantity == "content":
            return block.content
        return weights_of(self.record, block) if self.quantity == "weights" else block.scores


def bias_map(bias: Bias, layer: int, *, causal: bool) -> LayerMap | None:
    """The map of a bias that depends on distance alone, which needs no walk over blocks; None for any other."""
    profile = uniform_profile(bias, causal=causal)
    if profile is None:
        return None
    _, heads, queries, keys = bias.shape
    zeros = torch.zeros(heads)
    return LayerMap(layer, queries, keys, causal, bias.first_sequence(), None, profile, zeros, zeros.clone())


def _described_map(record: AttentionRecord, options: MapOptions) -> LayerMap | None:
    if not record.context_free or record.bias is None or not _is_described(record, options.shown):
        return None
    return bias_map(record.bias, record.layer, causal=record.causal)


def _is_described(record: AttentionRecord, shown: Shown) -> bool:
    """Whether the described bias of the first sequence is what is shown, of every head and wherever a map has one."""
    bias = record.bias
    if bias is None or record.rescore is not None or record.logit_scale is not None:
        return False
    if not bias.is_compact or bias.shape[1] != record.shape[1] or not (bias.shape[0] == 1 or shown == "first"):
        return False
    return _masks_order_alone(record)


def _masks_order_alone(record: AttentionRecord) -> bool:
    """Whether nothing but causality hides a key: no window and no padding. Of a two-sided layer, nothing at all."""
    for rows, columns in blocks(record.shape, 1, causal=record.causal):
        mask = record.mask(rows, columns)
        visible = order(rows, columns, *record.shape[2:]).to(mask.device) | (not record.causal)
        if not (mask == visible).all():
            return False
    return True


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


def _only_shifts(record: AttentionRecord) -> bool:
    """Whether scores are the content and a number per distance, the same for all sequences."""
    changed = (record.rescore, record.logit_scale, record.softcap)
    if record.bias is None or any(part is not None for part in changed) or record.bias.shape[1] != record.shape[1]:
        return False
    return uniform_profile(record.bias, causal=record.causal) is not None


def _bias_alone(visible: BlockMask, heads: slice, bias: Tensor | None) -> ScoreBlock:
    assert bias is not None
    return ScoreBlock(visible, heads, bias[:, heads], bias[:, heads], bias[:, heads])


def _single_map(
    x: Float[Tensor, "batch head row column"], mask: Bool[Tensor, "#batch 1 row column"], shown: Shown
) -> Float[Tensor, "head row column"]:
    """The first sequence, or the mean over those that see a key; x is 0 where they do not."""
    if shown == "first" or x.shape[0] == 1:
        return x[0]
    return x.sum(0) / mask.expand(x.shape[0], -1, -1, -1).sum(0).clamp(min=1)


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
    sums = []
    for head in range(x.shape[1]):
        parts = [part[head].flatten() for part in (*away, total)]
        *squares, of_total = (float(torch.dot(part, part)) for part in parts)
        sums.append(max(0.0, sum(squares) - of_total / count) / (count - 1))
    return torch.tensor(sums, dtype=torch.float64)
