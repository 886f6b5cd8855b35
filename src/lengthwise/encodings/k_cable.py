"""Kernelised CABLE (Veisi et al. 2025, "K-CABLE"): CABLE's levels under KERPLE's logarithm.

bias[i, j] = -slope[i] log(1 + (level[i] - level[j]) ** 2)
"""

import torch
from torch import Tensor

from lengthwise.bias import FunctionBias, Index, registered_tile
from lengthwise.encodings.base import Slot, State, Tokens
from lengthwise.encodings.levels import SlopedStepEncoding
from lengthwise.encodings.positions import Positions


class KCable(SlopedStepEncoding):
    """CABLE whose forgetting slows down with distance."""

    paper = "Veisi et al. 2025, arXiv 2503.08067"
    kind = FunctionBias

    def bias(
        self, x: Tokens, query: Positions, key: Positions, state: State | None = None, start: Slot | None = None
    ) -> FunctionBias:
        """-slope log(1 + difference ** 2)."""
        query_level, key_level = self.levels(x, query, key, state, start)
        return FunctionBias(k_cable_tile, (query_level, key_level, self.slope(x, query_level.shape[2])))


@registered_tile
def k_cable_tile(rows: Index, columns: Index, query_level: Tensor, key_level: Tensor, slope: Tensor) -> Tensor:
    """The difference is taken in float64, before it is rounded."""
    way = (query_level[..., rows, None] - key_level[..., None, columns]).to(slope.dtype)
    return -slope[..., rows, None] * torch.log1p(way**2)
