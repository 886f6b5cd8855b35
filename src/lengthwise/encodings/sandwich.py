"""Sandwich: the bias inside sinusoidal positions (Chi et al. 2023, section 4).

    bias[h, i, j] = heads / (8 (h + 1)) * sum over k < dim / 2 of cos((i - j) / 10000 ** (2k / dim))         h from 0

the product of two tokens' sinusoids (Vaswani et al. 2017), flatter from head to head. Nothing is learned. It is largest
on the diagonal, not 0 there, and falls in waves. dim is 128 whatever the width. A table with a number per distance.
"""

import torch
from torch import Tensor

from lengthwise.bias import Bias, DistanceBias, Index, registered, widest_dtype
from lengthwise.bias.constants import constant
from lengthwise.encodings._table_cache import TableCache, bias_of_distance
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class Sandwich(Encoding):
    """A falling sum of waves, and a factor per head."""

    paper = "Chi et al. 2023, arXiv 2212.10356"
    by_head = ("factors",)
    kind = DistanceBias
    symmetric = True
    context_free = True

    def __init__(self, shape: AttentionShape, *, dim: int = 128) -> None:
        super().__init__(shape)
        check_int("dim", dim, "The paper has 128.", least=2)
        self.dim = dim
        self.factors = [shape.heads / (8 * head) for head in range(1, shape.heads + 1)]
        self._tables = TableCache()

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """A table with one number per distance, or the function itself where positions have gaps."""
        device, causal = layout.query.device, self.shape.causal
        return bias_of_distance(self._tables, sandwich, lambda: self._numbers(device), layout, causal=causal)

    def _numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each head's factor and each wave's frequency."""
        wide = widest_dtype(device)
        factor = constant(tuple(self.factors), device, wide)
        return factor, 10000 ** (-torch.arange(0, self.dim // 2 * 2, 2, dtype=wide, device=device) / self.dim)


@registered
def sandwich(rows: Index, columns: Index, query: Tensor, key: Tensor, factor: Tensor, frequency: Tensor) -> Tensor:
    """The sum of waves at each distance, with heads second."""
    distance = (query[:, None, rows, None] - key[:, None, None, columns]).to(factor.dtype)
    total = sum((distance * wave).cos() for wave in frequency.unbind())
    return (factor[:, None, None] * total).float()
