"""The relative bias of the model Inkling (2026): every query mixes a few learned curves of the distance.

    rows[h, i]    = W x[i]                                     16 numbers per head
    bias[h, i, j] = rows[h, i] . profiles[:, i - j]            0 from a distance of `extent` on

The curves are shared by all heads. Two-sided attention has curves for both sides. In the model itself extent is 1,024,
or the window where there is one; queries and keys are normalised, scores are divided by head_dim, and full layers are
scaled up beyond a length, bias included. All of that is the model's, or a logit scale's, and not here.
"""

import torch
from torch import nn

from lengthwise.bias import QueryDistanceBias
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    State,
    Tokens,
    check_sides,
    checked_tokens,
    project,
    query_tokens,
    reset_linear,
)
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class Inkling(Encoding):
    """Curves of the distance that every query mixes for itself."""

    paper = "Thinking Machines 2026, the model Inkling"
    by_head = ("to_rows.weight",)
    kind = QueryDistanceBias
    tables = ("profiles",)

    def __init__(self, shape: AttentionShape, *, profiles: int = 16, extent: int = 1024) -> None:
        super().__init__(shape)
        check_int("profiles", profiles, "The model has 16.")
        check_int("extent", extent, "The model has 1,024.")
        self.first = 0 if shape.causal else 1 - extent
        self.to_rows = nn.Linear(shape.width, shape.heads * profiles, bias=False)
        self.profiles = nn.Parameter(torch.empty(profiles, extent - self.first))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), both."""
        reset_linear(self.to_rows)
        nn.init.normal_(self.profiles, std=0.02)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> QueryDistanceBias:
        """What the queries' tokens mix."""
        check_sides(layout, causal=self.shape.causal)
        checked_tokens(x, self.shape.width)
        rows = project(self.to_rows, query_tokens(x, layout)).unflatten(1, (self.shape.heads, -1)).transpose(2, 3)
        return QueryDistanceBias(rows, self.profiles[None], layout.query, layout.key, self.first, beyond="zero")
