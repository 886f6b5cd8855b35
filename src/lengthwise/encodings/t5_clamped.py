"""A learned number for every distance up to `reach`, constant beyond: the "T5-bias" of the CABLE paper's figures.

    bias[h, i, j] = table[h, clamp(i - j, 0, reach)]               causal, table (heads, reach + 1)
    bias[h, i, j] = table[h, clamp(i - j, -reach, reach) + reach]  two-sided, table (heads, 2 reach + 1)
    bias[h, i, j] = table[h, min(|i - j|, reach)]                  the same with `sides` alike, table (heads, reach + 1)

Their code divides q.k by sqrt(width) under this encoding; attention here divides by sqrt(head_dim), as everywhere.
"""

import torch
from torch import nn

from lengthwise.bias import DistanceBias
from lengthwise.encodings.base import AttentionShape, Encoding, Sides, State, Tokens, are_apart, check_sides
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class T5Clamped(Encoding):
    """A table of distances and nothing else."""

    paper = "Shaw et al. 2018, arXiv 1803.02155; Veisi et al. 2025, arXiv 2503.08067"
    by_head = ("table",)
    kind = DistanceBias
    context_free = True
    tables = ("table",)

    def __init__(self, shape: AttentionShape, *, reach: int = 256, sides: Sides = "apart") -> None:
        super().__init__(shape)
        check_int("reach", reach, "The paper has 256.")
        self.symmetric = not are_apart(shape, sides)
        self.first = 0 if shape.causal else -reach
        self.table = nn.Parameter(torch.empty(shape.heads, reach + 1 + (0 if self.symmetric else reach)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02)."""
        nn.init.normal_(self.table, std=0.02)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> DistanceBias:
        """The table as it is, or beside its mirror image."""
        check_sides(layout, causal=self.shape.causal)
        mirrored = self.symmetric and not self.shape.causal
        table = torch.cat([self.table[:, 1:].flip(1), self.table], 1) if mirrored else self.table
        return DistanceBias(table, layout.query, layout.key, first=self.first)
