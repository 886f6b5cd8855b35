"""Swin's relative bias (Liu et al. 2021, section 3.2): a learned number per head and offset in the plane.

    bias[h, i, j] = table[(row_i - row_j) + rows - 1, (column_i - column_j) + columns - 1, h]

for a grid of rows x columns tokens, beyond which it has no answer. Positions have rows and columns, or are counted
along the rows. A cell's code, row * (2 columns - 1) + column, makes one number of both: differences of codes tell all
offsets apart, so that it is a table of distances where positions have rows and columns, in the CPU kernel. Where they
are counted it is a function of the codes, tile by tile. Two-sided.
"""

import torch
from torch import Tensor, nn

from lengthwise.bias import Bias, DistanceBias, FunctionBias, Index, at_least_float32, picked_columns, registered
from lengthwise.bias.constants import constant
from lengthwise.encodings._cells import Cells, cells_of, checked_columns
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.errors import check_int
from lengthwise.token_layout import PositionError, TokenLayout


class Swin(Encoding):
    """A table of all offsets within a window of patches."""

    paper = "Liu et al. 2021, arXiv 2103.14030"
    by_head = (("table", 1),)
    kind = FunctionBias
    context_free = True
    tables = ("table",)

    def __init__(self, shape: AttentionShape, *, rows: int | None = None, columns: int | None = None) -> None:
        super().__init__(shape)
        self.columns = checked_columns(columns, shape)
        self.rows = self.columns if rows is None else rows
        check_int("rows", self.rows, "Leave it out for a square.")
        self.table = nn.Parameter(torch.empty((2 * self.rows - 1) * (2 * self.columns - 1), shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as the rest of GPT-2; transformers starts at 0."""
        nn.init.normal_(self.table, std=0.02)

    @property
    def limit(self) -> int:
        """How many cells the grid has."""
        return self.rows * self.columns

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """The table by differences of codes."""
        cells = cells_of(layout, self.columns)
        self._check_cells(cells[0])
        query, key = (row * (2 * self.columns - 1) + column for row, column in (own.unbind(-1) for own in cells))
        table, first = at_least_float32(self.table).T, -(self.rows - 1) * (2 * self.columns - 1) - self.columns + 1
        if layout.query.ndim == 3:
            return DistanceBias(table, query, key, first)
        return FunctionBias(code_table, (query, key, table, constant((first,), query.device)[0]))

    def _check_cells(self, cells: Cells) -> None:
        """An error for a cell outside the grid."""
        within = (cells < constant((self.rows, self.columns), cells.device)).all() & (cells >= 0).all()
        message = f"swin's table ends at {self.limit} cells, {self.rows} rows of {self.columns}"
        if torch.compiler.is_compiling() or not cells.is_cpu:
            torch._assert_async(within, message)
        elif not within:
            furthest = cells.flatten(0, 1).amax(0).tolist()
            raise PositionError(f"{message}, got row {furthest[0]} and column {furthest[1]}")


@registered
def code_table(rows: Index, columns: Index, query: Tensor, key: Tensor, table: Tensor, first: Tensor) -> Tensor:
    """table[query - key - first], with heads second; what no query may see is at an end of the table."""
    index = query[:, rows, None] - key[:, None, columns] - first
    return picked_columns(table, index.clamp(0, table.shape[1] - 1)).transpose(0, 1)
