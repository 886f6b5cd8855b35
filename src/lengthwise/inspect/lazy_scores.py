"""Single numbers of any head at any length: layers' records are kept, and a part is computed when it is read.

Queries and keys grow with the length, maps with its square; so the maps of all heads of a long text are never alive.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.errors import check_choice
from lengthwise.inspect.scores import BiasRows, BlockMask, score_block, weights_of
from lengthwise.model.families import AttentionRecord
from lengthwise.views.maps import Quantity

PER_PAIR = ("bias", "content", "scores", "weights")
"""What there is a number of for every query and key."""


class LazyScores:
    """The numbers of one sequence, by layer and head."""

    def __init__(self, records: Iterable[AttentionRecord] = ()) -> None:
        self._records: dict[int, AttentionRecord] = {}
        for record in records:
            self.add(record)

    def add(self, record: AttentionRecord) -> None:
        """Keep what the first sequence needs; values and outputs were compared while capturing."""
        mask = record.mask
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
        visible = BlockMask.of(record, rows, slice(0, keys))
        # Only a rescore needs all heads to compute one.
        heads = slice(head, head + 1) if record.rescore is None else slice(0, record.shape[1])
        bias = BiasRows(record, rows.stop - rows.start).block(visible)
        block = score_block(record, visible, heads, bias)
        mask = visible.mask[0, 0].expand(rows.stop - rows.start, keys)
        values = weights_of(record, block) if quantity == "weights" else getattr(block, quantity)
        return values[0, head - heads.start].masked_fill(~mask, torch.nan)[:, columns].float()

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
