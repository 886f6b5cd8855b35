"""Content, bias, scores and weights of a captured layer, by blocks of rows.

`verify` holds them against the layer's own output, so that a model which does something else is refused and not drawn
wrong.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.reference import of_heads, softmax
from lengthwise.bias import at_least_float32
from lengthwise.model.families.base import AttentionRecord
from lengthwise.views.tiles import first_forbidden

VERIFIED_ROWS = 4
"""How many of the first and of the last rows are compared with the layer's own output."""


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
        bias, (_, heads, queries, _) = self.record.bias, self.record.shape
        if bias is None:
            return None
        if self._shifted is None:
            tile = bias.tile(visible.rows, visible.columns)
        else:
            height = visible.rows.stop - visible.rows.start
            first = queries - 1 - visible.rows.start
            tile = self._shifted[None, :, :height, first + visible.columns.start : first + visible.columns.stop]
            if self.record.causal and visible.is_causal:
                return tile
        # A copy, since a tile may be the model's own.
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
    products = grouped.flatten(2, 3) @ k.transpose(-1, -2)
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
        visible = BlockMask.of(record, slice(start, stop), slice(0, keys))
        block = score_block(record, visible, slice(0, heads), bias_rows.block(visible))
        v = of_heads(record.v, record.q.shape[1] // record.v.shape[1])
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
