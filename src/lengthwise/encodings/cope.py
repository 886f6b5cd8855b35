"""CoPE: contextual position encoding (Golovneva et al. 2024, section 4).

    gate[i, j]     = sigmoid(content[i, j])                    0 where i may not see j
    position[i, j] = sum of gate[i, l] over l >= j             counted back from the query, at most positions - 1
    scores[i, j]   = content[i, j] + q[i] . e(position[i, j])  e between two columns of the table by interpolation

The table starts at 0 and is shared by the heads of a layer, as in the authors' code, where content is the scaled score.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.checks import check_whole
from lengthwise.encodings.base import Encoding, Geometry


class Cope(Encoding):
    """Positions that count only the keys a query cares about."""

    paper = "Golovneva et al. 2024, arXiv 2405.18719"
    two_sided = False
    tables = ("table",)

    def __init__(self, geometry: Geometry, *, positions: int = 64) -> None:
        super().__init__(geometry)
        check_whole("positions", positions, "The paper has 64.", least=2)
        self.table = nn.Parameter(torch.empty(geometry.head_dim, positions))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All 0."""
        nn.init.zeros_(self.table)

    def rescore(
        self,
        content: Float[Tensor, "batch head row key"],
        bias: Float[Tensor, "batch head row key"],
        q: Float[Tensor, "batch head row dim"],
        mask: Bool[Tensor, "#batch 1 row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """Content plus the query's own score of each contextual position."""
        gates = content.sigmoid().masked_fill(~mask, 0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.table.shape[1] - 1)
        of_table = q @ self.table.to(q.dtype)
        # A NaN has no column; it reaches its row through the interpolation.
        columns = (whole.nan_to_num(0).long() for whole in (position.floor(), position.ceil()))
        below, above = (of_table.gather(-1, column) for column in columns)
        return content + bias + torch.lerp(below, above, position - position.floor())
