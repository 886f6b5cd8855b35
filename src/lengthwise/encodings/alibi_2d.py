"""ALiBi on a grid (Fuller et al. 2023, CROMA, section 3).

    bias[h, i, j] = -slope[h] sqrt((row_i - row_j) ** 2 + (column_i - column_j) ** 2)

with ALiBi's interleaved slopes. Nothing is learned. Positions have rows and columns, or are counted along rows of
`columns` tokens. The bias is a function, computed tile by tile. Two-sided as causal.
"""

import torch
from torch import Tensor

from lengthwise.bias import FunctionBias, Index, registered
from lengthwise.bias.constants import constant
from lengthwise.encodings._cells import cells_of, checked_columns
from lengthwise.encodings.alibi import interleaved_slopes
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.token_layout import TokenLayout


class Alibi2d(Encoding):
    """A slope per head on the distance in the plane."""

    paper = "Fuller et al. 2023, arXiv 2311.00566"
    by_head = ("slopes",)
    kind = FunctionBias
    symmetric = True
    context_free = True

    def __init__(self, shape: AttentionShape, *, columns: int | None = None) -> None:
        super().__init__(shape)
        self.columns = checked_columns(columns, shape)
        self.slopes = interleaved_slopes(shape.heads)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> FunctionBias:
        """-slope |query - key|, in the plane."""
        query, key = cells_of(layout, self.columns)
        slope = constant(tuple(self.slopes), query.device, torch.float32)
        # The function's first two arguments have the queries and the keys along their last axis.
        return FunctionBias(alibi_2d, (query.mT, key.mT, slope))


@registered
def alibi_2d(rows: Index, columns: Index, query: Tensor, key: Tensor, slope: Tensor) -> Tensor:
    """Minus slope times the distance, with heads second."""
    between = query[:, :, rows, None] - key[:, :, None, columns]
    distance = between.square().sum(1, keepdim=True).to(slope.dtype).sqrt()
    return -slope[:, None, None] * distance
