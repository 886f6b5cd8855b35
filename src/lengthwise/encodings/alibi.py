"""ALiBi: attention with linear biases (Press et al. 2022, section 3).

    bias[h, i, j] = -slope[h] * |i - j|

Slopes are fixed, or learned (`learned`): then they start at the same numbers and stay positive. There are two rules,
equal where the number of heads is a power of two:
    geometric     slope[h] = 2 ** (-8 h / heads), h = 1 .. heads         the figures of the CABLE paper
    interleaved   geometric for the largest power of two below, then every other slope of twice as many heads
                                                                         the ALiBi authors, BLOOM, MPT

Two-sided, the sides are `alike`; or `apart`: then each head learns a slope for keys before the query and one for those
after it, both from the slope of the rule on.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lengthwise.bias import Bias, DistanceBias, Index, LevelBias, at_least_float32, has_float64, registered
from lengthwise.bias.constants import constant
from lengthwise.encodings._table_cache import TableCache, bias_of_distance, by_side
from lengthwise.encodings.base import AttentionShape, Encoding, Sides, State, Tokens, are_apart
from lengthwise.errors import check_choice, check_flag
from lengthwise.token_layout import TokenLayout


class Alibi(Encoding):
    """A level that climbs by 1 a token, and a slope per head."""

    paper = "Press et al. 2022, arXiv 2108.12409"
    by_head = ("slopes", "log_slope")
    kind: type[Bias] = LevelBias
    context_free = True
    tables = ("log_slope",)

    def __init__(
        self,
        shape: AttentionShape,
        *,
        slopes: Literal["geometric", "interleaved"] = "geometric",
        learned: bool = False,
        sides: Sides = "alike",
    ) -> None:
        super().__init__(shape)
        rules = {"geometric": geometric_slopes, "interleaved": interleaved_slopes}
        check_choice("slopes", slopes, tuple(rules), "The CABLE paper has 'geometric', BLOOM 'interleaved'.")
        check_flag("learned", learned)
        apart = are_apart(shape, sides)
        if apart and not learned:
            raise ValueError("slopes start alike on both sides: sides='apart' must be learned, got learned=False")
        self.symmetric = not apart
        self.slopes = rules[slopes](shape.heads)
        numbers = (shape.heads, 2) if apart else (shape.heads,)
        self.log_slope = nn.Parameter(torch.empty(numbers)) if learned else None
        if apart:
            self.kind = DistanceBias
        self._tables = TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The slopes of the rule, if they are learned."""
        if self.log_slope is not None:
            with torch.no_grad():
                rule = torch.tensor(self.slopes, device="cpu").log()
                self.log_slope.copy_(rule.view(-1, *[1] * (self.log_slope.ndim - 1)))

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """-slope |query - key|: levels, or with a slope for each side a table."""
        if self.log_slope is not None and self.log_slope.ndim == 2:
            learned = self.log_slope
            numbers = lambda: (at_least_float32(learned).exp(),)  # noqa: E731
            return bias_of_distance(self._tables, alibi_sides, numbers, layout, learned, causal=False)
        device = layout.query.device
        if self.log_slope is None:
            slope = constant(tuple(self.slopes), device, torch.float32)[None, :, None]
        else:
            slope = at_least_float32(self.log_slope).exp()[None, :, None]
        query, key = layout.query[:, None], layout.key[:, None]
        if has_float64(device):
            return LevelBias(query.double(), key.double(), slope)
        # Positions below 2 ** 24 are float32 numbers themselves: nothing is left for the rest.
        query, key = query.float(), key.float()
        return LevelBias(query, key, slope, query_rest=torch.zeros_like(query), key_rest=torch.zeros_like(key))


def alibi_line(rows: Index, columns: Index, query: Tensor, key: Tensor, slope: Tensor) -> Tensor:
    """-slope |query - key|."""
    distance = (query[:, None, rows, None] - key[:, None, None, columns]).abs()
    return -slope[:, None, None] * distance.to(slope.dtype)


@registered
def alibi_sides(rows: Index, columns: Index, query: Tensor, key: Tensor, slope: Tensor) -> Tensor:
    """The same with a slope for each side."""
    return by_side(alibi_line, rows, columns, query, key, slope)


def geometric_slopes(heads: int) -> list[float]:
    """One geometric sequence from near 1 down to 1/256."""
    return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]


def interleaved_slopes(heads: int) -> list[float]:
    """The sequence of a power of two, and what is missing from between the members of the next."""
    below = 2 ** (heads.bit_length() - 1)
    return geometric_slopes(below) + geometric_slopes(2 * below)[0::2][: heads - below]
