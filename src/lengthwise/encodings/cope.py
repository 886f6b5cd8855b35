"""CoPE: contextual position encoding (Golovneva et al. 2024, section 4).

    gate[i, j]     = sigmoid(content[i, j])                    0 where i may not see j
    position[i, j] = sum of gate[i, l] over l >= j             counted back from the query, at most positions - 1
    scores[i, j]   = content[i, j] + q[i] . e(position[i, j])  e between two columns of the table by interpolation

The table starts at 0 and is shared by the heads of a layer, as in the authors' code, where content is the scaled score.
"""

import torch
from torch import nn

from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.errors import check_int
from lengthwise.rescore import ContextualPositions
from lengthwise.token_layout import TokenLayout


class Cope(Encoding):
    """Positions that count only the keys a query cares about."""

    paper = "Golovneva et al. 2024, arXiv 2405.18719"
    by_head = ()
    rescores_qk = True
    two_sided = False
    tables = ("table",)

    def __init__(self, shape: AttentionShape, *, positions: int = 64) -> None:
        super().__init__(shape)
        check_int("positions", positions, "The paper has 64.", least=2)
        self.table = nn.Parameter(torch.empty(shape.head_dim, positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All 0."""
        nn.init.zeros_(self.table)

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> ContextualPositions:
        """Content plus the query's own score of each contextual position."""
        return ContextualPositions(self.table)
