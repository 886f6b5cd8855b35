"""Content, bias, scores and weights of a captured layer by blocks of rows, single numbers of it, its rotary kernel.

`verify` holds them against the layer's own output, so that a model which does something else is refused and not drawn
wrong.

`LazyScores` gives single numbers of any head at any length: layers' records are kept, and a part is computed when it is
read. Queries and keys grow with the length, maps with its square; so the maps of all heads of a long text are never
alive.

The kernel of a rotary head is how the mean query scores the mean key at every distance:

    kernel[d] = scale * R_d E[q] . E[k]          E over the tokens, before they are rotated

What a head would attend to if all tokens were alike: the positional part of an encoding that adds nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.reference import of_heads, softmax
from lengthwise.bias import at_least_float32
from lengthwise.errors import check_choice
from lengthwise.model.families import AttentionRecord
from lengthwise.views.maps import Quantity
from lengthwise.views.tiles import BLOCK, first_forbidden

VERIFIED_ROWS = 4
"""How many of the first and of the last rows are compared with the layer's own output."""
PER_PAIR = ("bias", "content", "scores", "weights")
"""What there is a number of for every query and key."""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which keys some rows see."""

    rows: slice
    columns: slice
    mask: Bool[Tensor, "#batch 1 row column"]
    free: int
    """How many of the first columns every row sees: these need no masking, and under causality they are most."""

    @classmethod
    def of(cls, record: AttentionRecord, rows: slice, columns: slice) -> "BlockMask":
        """That of some rows and columns of a record."""
        mask = record.mask(rows, columns)
        return cls(rows, columns, mask, first_forbidden(mask))

    @property
    def is_causal(self) -> bool:
        """Whether the keys up to each query are visible, and no others; queries are counted as keys are."""
        first, last = self.rows.start, self.rows.stop
        ends = torch.arange(first + 1, last + 1).clamp(max=self.columns.stop) - self.columns.start
        return self.mask.shape[:2] == (1, 1) and int(self.mask.sum()) == int(ends.clamp(min=0).sum())

    def fill(self, x: Float[Tensor, "batch head row column"], value: float) -> Tensor:
        """x itself, with a value in the place of hidden keys."""
        x[..., self.free :].masked_fill_(~self.mask[..., self.free :], value)
        return x


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Some rows of some heads; everything is 0 where a key is hidden, and `bias` is None where there is none."""

    visible: BlockMask
    heads: slice
    content: Float[Tensor, "batch head row column"]
    bias: Float[Tensor, "batch head row column"] | None
    scores: Float[Tensor, "batch head row column"]


class BiasRows:
    """The additive term of a layer, by blocks of at most `height` rows of all heads."""

    def __init__(self, record: AttentionRecord, height: int) -> None:
        self.record, self._shifted = record, None
        bias, (_, heads, queries, keys) = record.bias, record.shape
        if bias is not None and bias.shape == (1, heads, queries, keys) and queries == keys and bias.is_uniform:
            # Where distance alone decides, rows differ in where they begin: the last row and, if there is one to be
            # seen, what the first one has ahead. A row one further down is the same one place to the right.
            ahead, last = (bias.tile(slice(row, row + 1), slice(None))[0, :, 0] for row in (0, queries - 1))
            ahead = torch.zeros_like(ahead) if record.causal else ahead
            row = torch.cat([last, ahead[:, 1:]], -1)
            self._shifted = row.new_zeros(heads, height, row.shape[1] + height)
            for place in range(height):
                self._shifted[:, place, place : place + row.shape[1]] = row

    def block(self, visible: BlockMask) -> Float[Tensor, "#batch head row column"] | None:
        """Some rows, 0 where a key is hidden."""
        if self._shifted is None:
            return visible_bias(self.record, visible)
        _, heads, queries, _ = self.record.shape
        height = visible.rows.stop - visible.rows.start
        first = queries - 1 - visible.rows.start
        tile = self._shifted[None, :, :height, first + visible.columns.start : first + visible.columns.stop]
        return tile if self.record.causal and visible.is_causal else _visible(tile, visible, heads)


def visible_bias(record: AttentionRecord, visible: BlockMask) -> Float[Tensor, "#batch head row column"] | None:
    """Some rows of the additive term of all heads, 0 where a key is hidden."""
    if record.bias is None:
        return None
    return _visible(record.bias.tile(visible.rows, visible.columns), visible, record.shape[1])


def _visible(tile: Tensor, visible: BlockMask, heads: int) -> Float[Tensor, "#batch head row column"]:
    """A copy, since a tile may be the model's own, with 0 where a key is hidden."""
    shape = (max(tile.shape[0], visible.mask.shape[0]), heads, *tile.shape[2:])
    return visible.fill(torch.empty(shape, dtype=tile.dtype, device=tile.device).copy_(tile), 0)


def score_block(record: AttentionRecord, visible: BlockMask, heads: slice, every_bias: Tensor | None) -> ScoreBlock:
    """Some whole rows of some heads, from those of the bias of all; the columns must be all that the rows see.

    Heads must be all that share some keys, or some of them. Content and bias are those that the scores are the sum of,
    so a logit scale is in both.
    """
    group = record.q.shape[1] // record.k.shape[1]
    q = at_least_float32(record.q[:, heads, visible.rows])
    k = at_least_float32(record.k[:, heads.start // group : -(-heads.stop // group), visible.columns])
    # Heads that share keys are rows of one product.
    grouped = (record.scale * q).unflatten(1, (k.shape[1], -1))
    products = q.new_empty(*grouped.shape[:2], grouped.shape[2] * grouped.shape[3], k.shape[2])
    # A sequence at a time: some heads of several lie apart, and one product of all would first copy every key.
    for out, rows, keys in zip(products, grouped.flatten(2, 3), k, strict=True):
        torch.bmm(rows, keys.transpose(1, 2), out=out)
    content = visible.fill(products.unflatten(2, grouped.shape[2:4]).flatten(1, 2), 0)
    if record.softcap is not None:
        content = record.softcap * torch.tanh(content / record.softcap)
    bias = None if every_bias is None else every_bias[:, heads]
    factor = None
    if record.logit_scale is not None:
        factor = at_least_float32(record.logit_scale).expand(-1, record.shape[1], -1)[:, heads, visible.rows, None]
    if record.rescore is not None:
        added = torch.zeros_like(content) if bias is None else bias.expand_as(content)
        rescored = record.rescore.apply(content, added, q, of_heads(k, group), visible.mask, visible.rows)
        scores = visible.fill(rescored, 0)
        if factor is not None:
            content, scores = factor * content, factor * scores
        # What is added in the end is the positional part, whatever it was made from.
        bias = scores - content
    else:
        if factor is not None:
            content, bias = factor * content, None if bias is None else factor * bias
        scores = content if bias is None else content + bias
    return ScoreBlock(visible, heads, content, bias, scores)


def weights_of(record: AttentionRecord, block: ScoreBlock) -> Float[Tensor, "batch head row column"]:
    """The softmax of a block of scores; a sink takes its share and is left out."""
    scores = block.visible.fill(block.scores, -torch.inf)
    if record.sink is None and block.visible.free:
        weights = scores.softmax(-1)
        block.visible.fill(scores, 0)
        return weights
    sink = record.sink
    if sink is not None:
        spread = at_least_float32(sink).expand(record.shape[0], -1, record.shape[2])
        sink = spread[:, block.heads, block.visible.rows]
    weights = softmax(scores, sink)[0]
    block.visible.fill(scores, 0)
    return weights


def verify(record: AttentionRecord, name: str) -> None:
    """An error unless weights times values is the layer's own output, on its first and last rows."""
    _, heads, queries, keys = record.shape
    bias_rows = BiasRows(record, VERIFIED_ROWS)
    for start, stop in {(0, min(VERIFIED_ROWS, queries)), (max(0, queries - VERIFIED_ROWS), queries)}:
        # Under causality the first rows see a few keys only.
        seen = max(1, stop + keys - queries) if record.causal else keys
        visible = BlockMask.of(record, slice(start, stop), slice(0, seen))
        block = score_block(record, visible, slice(0, heads), bias_rows.block(visible))
        v = of_heads(record.v[:, :, :seen], record.q.shape[1] // record.v.shape[1])
        own = at_least_float32(record.out[:, :, start:stop])
        sees_nothing = ~visible.mask.any(-1)[..., None]
        difference = (weights_of(record, block) @ v - own).masked_fill(sees_nothing, 0).abs().max()
        # A score's rounding is relative to the score, and a weight's to that; inside, float32 is usual everywhere.
        eps = max(torch.finfo(dtype).eps for dtype in (record.out.dtype, torch.float32))
        allowed = 16 * eps * (1 + block.scores.abs().max()) * v.abs().max()
        if not difference <= allowed:
            raise NotImplementedError(
                f"layer {record.layer} of {name} must give softmax(scores) v of its arguments to {allowed:.1e}, but "
                f"differs by {difference:.1e}: its attention does more than is known here. A model in training mode "
                "applies dropout: call eval() first. A family with attention code of its own needs a file in "
                "lengthwise/model/families"
            )


class LazyScores:
    """The numbers of one sequence, by layer and head."""

    def __init__(self, records: Iterable[AttentionRecord] = ()) -> None:
        self._records: dict[int, AttentionRecord] = {}
        for record in records:
            self.add(record)

    def add(self, record: AttentionRecord) -> None:
        """Keep what the first sequence needs; values and outputs were compared while capturing."""
        mask = record.mask
        # The call is left out, since it has every sequence's queries, keys and values.
        self._records[record.layer] = replace(
            record,
            q=record.q[:1].clone(),
            k=record.k[:1].clone(),
            v=record.v[:1, ..., :0].clone(),
            out=record.out[:1, ..., :0].clone(),
            bias=None if record.bias is None else record.bias.first_sequence(),
            mask=lambda rows, columns: mask(rows, columns)[:1],
            logit_scale=None if record.logit_scale is None else record.logit_scale[:1],
            sink=None if record.sink is None else record.sink[:1],
            rotary=None,
            call=None,
        )

    @torch.no_grad()
    def part(
        self, quantity: Quantity, layer: int, head: int, rows: slice, columns: slice
    ) -> Float[Tensor, "row column"]:
        """Some rows and columns of one head, NaN where a key is hidden."""
        check_choice("quantity", quantity, PER_PAIR)
        record = self.record(layer, head)
        _, _, queries, keys = record.shape
        for name, span, size in (("rows", rows, queries), ("columns", columns, keys)):
            if not 0 <= span.start < span.stop <= size:
                raise ValueError(f"{name} must lie within 0 to {size}, got {span.start} to {span.stop}")
        if quantity == "bias" and not record.has_bias:
            raise ValueError("quantity='bias' needs a model that adds one, but this model adds none")
        # A bias gives the rows of all heads, so that there are only some of them at a time.
        height = max(1, BLOCK // (record.shape[1] * keys))
        values = torch.empty(rows.stop - rows.start, columns.stop - columns.start, device=record.q.device)
        for start in range(rows.start, rows.stop, height):
            block = slice(start, min(start + height, rows.stop))
            values[start - rows.start : block.stop - rows.start] = _one_head(record, quantity, head, block)[:, columns]
        return values

    def whole(self, quantity: Quantity, layer: int, head: int) -> Float[Tensor, "query key"]:
        """Every number of one head."""
        _, _, queries, keys = self.record(layer, head).shape
        return self.part(quantity, layer, head, slice(0, queries), slice(0, keys))

    def record(self, layer: int, head: int) -> AttentionRecord:
        """The record of a layer that has such a head, or an error."""
        record = self._records.get(layer)
        if record is None or not 0 <= head < record.shape[1]:
            raise ValueError(
                f"layer and head must be ones that the model has, got Layer {layer + 1}, Head {head + 1} "
                f"(indices {layer}, {head})"
            )
        return record


def _one_head(record: AttentionRecord, quantity: Quantity, head: int, rows: slice) -> Float[Tensor, "row key"]:
    """Some whole rows of one head of the first sequence, NaN where a key is hidden."""
    visible = BlockMask.of(record, rows, slice(0, record.shape[3]))
    # Only a rescore needs all heads to compute one.
    heads = slice(head, head + 1) if record.rescore is None else slice(0, record.shape[1])
    block = score_block(record, visible, heads, visible_bias(record, visible))
    values = weights_of(record, block) if quantity == "weights" else getattr(block, quantity)
    mask = visible.mask[0, 0].expand(values.shape[2:])
    return values[0, head - heads.start].masked_fill(~mask, torch.nan).float()


def rotary_kernel(record: AttentionRecord) -> Float[Tensor, "head distance"] | None:
    """The kernel of every head; None where the layer does not rotate, or its rotation cannot be undone."""
    rotary = record.rotary
    unrotated = None if rotary is None else rotary.unrotated()
    if rotary is None or unrotated is None:
        return None
    queries = record.shape[2]
    means = [_mean(x, rotary.query_mask).expand(-1, -1, queries, -1) for x in unrotated]
    q, k = rotary.rotate(*means)
    at_zero = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    kernel = record.scale * (q * at_zero).sum(-1)[0].float().cpu()
    # Transformer-XL adds to its queries and does not turn them.
    is_flat = queries > 1 and bool((kernel == kernel[:, :1]).all())
    return None if is_flat else kernel


def _mean(x: Float[Tensor, "batch head token dim"], mask: Bool[Tensor, "#batch token"] | None) -> Tensor:
    """The mean over tokens and sequences, (1, head, 1, dim)."""
    if mask is None:
        return at_least_float32(x).mean((0, 2), keepdim=True)
    real = mask.expand(x.shape[0], -1)[:, None, :, None]
    return at_least_float32(x).masked_fill(~real, 0).sum((0, 2), keepdim=True) / real.sum()
