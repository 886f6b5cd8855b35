"""T5's relative bias (Raffel et al. 2020, section 2.1): a learned number per head and bucket of distances.

    bias[h, i, j] = table[bucket(i - j), h]

The first half of the buckets hold one distance each; the rest grow in geometric steps up to `max_distance`, and the
last one takes everything beyond. Causal attention has all buckets for the past. Two-sided, the sides are `apart`: half
of the buckets per side, keys after the query in the upper half, as in T5's encoder; or `alike`: all buckets for
|i - j|. T5 itself shares one table among all layers and does not scale its scores.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import DistanceBias
from lengthwise.bias.constants import constant
from lengthwise.encodings._table_cache import TableCache, is_decoding
from lengthwise.encodings.base import AttentionShape, Encoding, Sides, State, Tokens, are_apart, check_sides
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class T5(Encoding):
    """Exact nearby, coarser with distance, constant from `max_distance` on."""

    paper = "Raffel et al. 2020, arXiv 1910.10683"
    by_head = (("table", 1),)
    kind = DistanceBias
    context_free = True
    tables = ("table",)

    def __init__(
        self, shape: AttentionShape, *, buckets: int = 32, max_distance: int = 128, sides: Sides = "apart"
    ) -> None:
        super().__init__(shape)
        check_int("buckets", buckets, "T5 has 32.")
        check_int("max_distance", max_distance, "T5 has 128.")
        apart = are_apart(shape, sides)
        side = buckets // 2 if apart else buckets
        if side < 2 or side % 2 or max_distance <= side // 2 or (apart and buckets % 2):
            raise ValueError(
                "a side must have an even number of buckets, 2 or more, and max_distance beyond the exact half, got "
                f"buckets={buckets}, max_distance={max_distance}; T5 has 32 and 128"
            )
        self.past = bucket_of_distance(side, max_distance)
        self.symmetric = not apart
        self.ahead = [] if shape.causal else [side * apart + bucket for bucket in self.past[:0:-1]]
        self.table = nn.Parameter(torch.empty(buckets, shape.heads))
        self._tables = TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as the rest of GPT-2."""
        nn.init.normal_(self.table, std=0.02)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> DistanceBias:
        """The table spread out over the distances that differ."""
        check_sides(layout, causal=self.shape.causal)
        table = self._tables.table(self._spread, 1, self.table, decoding=is_decoding(layout))
        return DistanceBias(table, layout.query, layout.key, first=-len(self.ahead))

    def _spread(self, _: int) -> Float[Tensor, "head distance"]:
        """One number per distance, as many as differ, however far there is to look."""
        return self.table[constant((*self.ahead, *self.past), self.table.device)].T.contiguous()


def bucket_of_distance(buckets: int, max_distance: int) -> list[int]:
    """The bucket of each distance from 0 to max_distance, in whole numbers, so that no border depends on rounding.

    Bucket exact + n begins where (d / exact) ** steps >= (max_distance / exact) ** n.
    """
    exact = buckets // 2
    steps = buckets - exact

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        grown = (n for n in range(steps, 0, -1) if distance**steps * exact**n >= max_distance**n * exact**steps)
        return min(exact + next(grown, 0), buckets - 1)

    return [bucket(distance) for distance in range(max_distance + 1)]
