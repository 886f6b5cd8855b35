"""Single numbers of any head at any length: what the layers were given is kept, and a part is computed when asked for.

Queries and keys grow with the length, maps with its square; so the maps of all heads of a long text are never alive.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.errors import check_choice
from lengthwise.inspect.record import Block, Record
from lengthwise.views.maps import What

KINDS = ("bias", "content", "scores", "weights")


class Cells:
    """The numbers of one sequence, by layer and head."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._records: dict[int, Record] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Keep what the first sequence needs; values and outputs were verified and are not needed again."""
        mask = record.mask
        self._records[record.layer] = replace(
            record,
            q=record.q[:1].clone(),
            k=record.k[:1].clone(),
            v=record.v[:1, ..., :0].clone(),
            out=record.out[:1, ..., :0].clone(),
            bias=None if record.bias is None else record.bias.first_sequence(),
            mask=lambda rows, columns: mask(rows, columns)[:1],
            rotated=None,
        )

    @torch.no_grad()
    def part(self, what: What, layer: int, head: int, rows: slice, columns: slice) -> Float[Tensor, "row column"]:
        """Some rows and columns of one head, NaN where a query may not look."""
        record = self.record(layer, head)
        _, _, queries, keys = record.shape
        for name, asked, size in (("rows", rows, queries), ("columns", columns, keys)):
            if not 0 <= asked.start < asked.stop <= size:
                raise ValueError(
                    f"{name} must be some of 0 to {size}; {asked.start} to {asked.stop} came. Ask within the map."
                )
        if what == "bias" and not record.adds:
            raise ValueError("a bias must be added to be seen; this model adds none. Ask for its scores.")
        block = record.block(rows, slice(0, keys))
        may = block.may[0, 0].expand(rows.stop - rows.start, keys)
        return self._of(block, what, record)[0, head].masked_fill(~may, torch.nan)[:, columns].float()

    def whole(self, what: What, layer: int, head: int) -> Float[Tensor, "query key"]:
        """Every number of one head."""
        _, _, queries, keys = self.record(layer, head).shape
        return self.part(what, layer, head, slice(0, queries), slice(0, keys))

    def record(self, layer: int, head: int) -> Record:
        """What a layer was given, or an error."""
        record = self._records.get(layer)
        if record is None or not 0 <= head < record.shape[1]:
            raise ValueError(
                f"layer and head must be ones that the model has; Layer {layer + 1}, Head {head + 1} "
                f"(indices {layer}, {head}) came. Change it."
            )
        return record

    @staticmethod
    def _of(block: Block, what: What, record: Record) -> Float[Tensor, "batch head row column"]:
        check_choice("what", what, KINDS, "Those are maps.")
        if what == "weights":
            return record.weights(block)
        found = {"bias": block.bias, "content": block.content, "scores": block.scores}[what]
        assert found is not None, "a layer that adds nothing was refused before"
        return found
