"""BAM: Bayesian attention with a prior over distance (Bianchessi et al. 2025, section 3), a generalised Gaussian.

    bias[h, i, j] = -(|i - j + location[h]| * scale[h] + 1e-5) ** shape[h]

shape is learned, positive, from 1; scale is ALiBi's interleaved slope and location 0, both fixed unless `learned` is
"all". So it starts as ALiBi (and 1e-5). The authors do not keep the shape positive; below 0 theirs turns over and
hides the diagonal. They give all layers one prior: `share_encoding` of the model. Their long results are with `ssmax`.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lengthwise.bias import Bias, DistanceBias, Index, at_least_float32, registered
from lengthwise.bias.constants import constant
from lengthwise.encodings._table_cache import TableCache, bias_of_distance
from lengthwise.encodings.alibi import interleaved_slopes
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.errors import check_choice
from lengthwise.token_layout import TokenLayout


class Bam(Encoding):
    """A power of distance, the power learned."""

    paper = "Bianchessi et al. 2025, arXiv 2505.22842"
    by_head = ("slopes", "log_shape", "log_scale", "sinh_location")
    kind = DistanceBias
    context_free = True

    def __init__(self, shape: AttentionShape, *, learned: Literal["shape", "all"] = "shape") -> None:
        super().__init__(shape)
        check_choice("learned", learned, ("shape", "all"), "The authors learn the shape.")
        self.slopes = interleaved_slopes(shape.heads)
        self.log_shape = nn.Parameter(torch.empty(shape.heads))
        self.log_scale, self.sinh_location = (
            nn.Parameter(torch.empty(shape.heads)) if learned == "all" else None for _ in range(2)
        )
        self.symmetric = learned == "shape"  # a location moves the middle to one side
        self._tables = TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Shape 1, ALiBi's slopes, location 0."""
        nn.init.zeros_(self.log_shape)
        if self.log_scale is not None and self.sinh_location is not None:
            nn.init.zeros_(self.sinh_location)
            with torch.no_grad():
                self.log_scale.copy_(self._slopes(torch.device("cpu")).log())

    def _slopes(self, device: torch.device) -> Tensor:
        return constant(tuple(self.slopes), device, torch.float32)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """A table with one number per distance, or the function itself where positions have gaps."""
        made_of = [p for p in (self.log_shape, self.log_scale, self.sinh_location) if p is not None]
        causal = self.shape.causal
        return bias_of_distance(self._tables, bam, self._numbers, layout, *made_of, causal=causal)

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Shape, scale and location of each head."""
        shape = at_least_float32(self.log_shape).exp()
        if self.log_scale is None or self.sinh_location is None:
            return shape, self._slopes(shape.device).to(shape.dtype), torch.zeros_like(shape)
        return shape, at_least_float32(self.log_scale).exp(), 2 * at_least_float32(self.sinh_location).sinh()


@registered
def bam(
    rows: Index, columns: Index, query: Tensor, key: Tensor, shape: Tensor, scale: Tensor, location: Tensor
) -> Tensor:
    """-(|distance + location| scale + 1e-5) ** shape."""
    distance = (query[:, None, rows, None] - key[:, None, None, columns]).to(shape.dtype)
    shape, scale, location = (numbers[:, None, None] for numbers in (shape, scale, location))
    return -(((distance + location).abs() * scale + 1e-5) ** shape)
