"""Learned absolute positions, GPT-2's `wpe` (Radford et al. 2019): a table added to the tokens.

    x[b, i] + weight[positions[b, i]]            weight ~ N(0, 0.02)

The table has an end, and so has every model that uses it.
"""

import torch
from torch import nn

from lengthwise.encodings.base import AttentionShape, Encoding, Tokens, checked_count, checked_tokens
from lengthwise.errors import check_int
from lengthwise.token_layout import PositionError, TokenLayout


class Learned(Encoding):
    """One learned vector per position, up to `length` of them (the training length if not given)."""

    paper = "Radford et al. 2019 (GPT-2)"
    by_head = ()
    tables = ("weight",)

    def __init__(self, shape: AttentionShape, *, length: int | None = None) -> None:
        super().__init__(shape)
        length = shape.train_length if length is None else length
        check_int("length", length, "Leave it out for the training length.")
        self.weight = nn.Parameter(torch.empty(length, shape.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02)."""
        nn.init.normal_(self.weight, std=0.02)

    @property
    def limit(self) -> int:
        """The length of the table."""
        return self.weight.shape[0]

    def embed(self, x: Tokens, layout: TokenLayout) -> Tokens:
        """Tokens plus the row of their position."""
        positions = layout.query
        checked_tokens(x, self.shape.width)
        checked_count(x, positions, of="position")
        if layout.facts is not None and layout.facts.highest >= self.limit:
            raise PositionError(
                f"learned positions end at {self.limit}, got position {layout.facts.highest}; without a limit are e.g. "
                "'alibi', 'kerple' and 'cable'"
            )
        return x + self.weight[positions].to(x.dtype)
