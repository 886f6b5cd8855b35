"""Relative positions in the keys (Shaw et al. 2018, section 3.2): a query meets a vector of the distance like a key.

    bias[h, i, j] = q[h, i] . table[clamp(i - j, 0, reach)] / sqrt(head_dim)                causal
    bias[h, i, j] = q[h, i] . table[clamp(i - j, -reach, reach) + reach] / sqrt(head_dim)   two-sided

One table for all heads of a layer; the paper's reach is 16. It also gives the values a vector of the distance, which is
no part of the scores and not here.
"""

import torch
from torch import Tensor, nn

from lengthwise.bias import QueryDistanceBias
from lengthwise.encodings.base import AttentionShape, QueryEncoding, State, Tokens, check_sides
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class Shaw(QueryEncoding):
    """A vector for every distance, constant beyond `reach`."""

    paper = "Shaw et al. 2018, arXiv 1803.02155"
    by_head = ()
    kind = QueryDistanceBias
    tables = ("table",)

    def __init__(self, shape: AttentionShape, *, reach: int = 16) -> None:
        super().__init__(shape)
        check_int("reach", reach, "The paper has 16.")
        self.first = 0 if shape.causal else -reach
        self.table = nn.Parameter(torch.empty(reach + 1 - self.first, shape.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), as the rest of GPT-2."""
        nn.init.normal_(self.table, std=0.02)

    def bias(
        self,
        x: Tokens,
        layout: TokenLayout,
        state: State | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> QueryDistanceBias:
        """Queries that meet the table."""
        check_sides(layout, causal=self.shape.causal)
        rows = self.queries(q, layout) * self.shape.head_dim**-0.5
        return QueryDistanceBias(rows, self.table.T[None], layout.query, layout.key, first=self.first)
