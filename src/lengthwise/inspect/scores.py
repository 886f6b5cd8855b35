"""Content, bias, scores and weights of a captured layer, by blocks of rows.

`verify` holds them against the layer's own output, so that a model which does something else is refused and not drawn
wrong.
"""

from collections.abc import Iterator
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


def bias_block(record: AttentionRecord, visible: BlockMask) -> Float[Tensor, "#batch head row column"] | None:
    """Some rows of the additive term of all heads, 0 where a key is hidden; a copy, since a tile may be the model's."""
    if record.bias is None:
        return None
    tile = record.bias.tile(visible.rows, visible.columns)
    batch = max(tile.shape[0], visible.mask.shape[0])
    shape = (batch, record.shape[1], *tile.shape[2:])
    return visible.fill(torch.empty(shape, dtype=tile.dtype, device=tile.device).copy_(tile), 0)


def score_blocks(
    record: AttentionRecord, visible: BlockMask, heads: tuple[slice, ...] | None = None
) -> Iterator[ScoreBlock]:
    """Some whole rows, some heads at a time; the columns must be all that the rows see.

    Content and bias are those that the scores are the sum of, so a logit scale is in both.
    """
    every_bias = bias_block(record, visible)
    group = record.q.shape[1] // record.k.shape[1]
    for some in heads or (slice(0, record.shape[1]),):
        q = at_least_float32(record.q[:, some, visible.rows])
        keys = slice(some.start // group, -(-some.stop // group))
        k = at_least_float32(record.k[:, keys, visible.columns])
        # Heads that share keys are rows of one product.
        grouped = (record.scale * q).unflatten(1, (k.shape[1], -1))
        products = grouped.flatten(2, 3) @ k.transpose(-1, -2)
        content = visible.fill(products.unflatten(2, grouped.shape[2:4]).flatten(1, 2), 0)
        bias = None if every_bias is None else every_bias[:, some]
        factor = None
        if record.logit_scale is not None:
            spread = record.logit_scale.expand(-1, record.shape[1], -1)[:, some, visible.rows, None]
            factor = at_least_float32(spread)
        if record.rescore is not None:
            added = torch.zeros_like(content) if bias is None else bias.expand_as(content)
            rescored = record.rescore.scores(content, added, q, of_heads(k, group), visible.mask, visible.rows)
            scores = visible.fill(rescored, 0)
            if factor is not None:
                content, scores = factor * content, factor * scores
            # What is added in the end is the positional part, whatever it was made from.
            bias = scores - content
        else:
            if factor is not None:
                content, bias = factor * content, None if bias is None else factor * bias
            scores = content if bias is None else content + bias
        if record.softcap is not None:
            scores = record.softcap * torch.tanh(scores / record.softcap)
        yield ScoreBlock(visible, some, content, bias, scores)


def weights_of(record: AttentionRecord, block: ScoreBlock) -> Float[Tensor, "batch head row column"]:
    """The softmax of a block of scores; a sink takes its share and is left out."""
    scores = block.visible.fill(block.scores.clone(), -torch.inf)
    if record.sink is None and block.visible.free:
        return scores.softmax(-1)
    sink = record.sink
    if sink is not None:
        spread = at_least_float32(sink).expand(record.shape[0], -1, record.shape[2])
        sink = spread[:, block.heads, block.visible.rows]
    return softmax(scores, sink)[0]


def verify(record: AttentionRecord, name: str) -> None:
    """An error unless weights times values is the layer's own output, on its first and last rows."""
    queries, keys = record.shape[2:]
    for start, stop in {(0, min(VERIFIED_ROWS, queries)), (max(0, queries - VERIFIED_ROWS), queries)}:
        visible = BlockMask.of(record, slice(start, stop), slice(0, keys))
        (block,) = score_blocks(record, visible)
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
