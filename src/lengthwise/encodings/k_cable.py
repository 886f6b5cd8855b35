"""Kernelised CABLE (Veisi et al. 2025, "K-CABLE"): CABLE's levels under KERPLE's logarithm.

bias[i, j] = -slope[i] log(1 + (level[i] - level[j]) ** 2)
"""

from lengthwise.bias import LevelBias
from lengthwise.encodings._cumulative import SlopedStepEncoding


class KCable(SlopedStepEncoding):
    """CABLE whose forgetting slows down with distance."""

    paper = "Veisi et al. 2025, arXiv 2503.08067"
    kind = LevelBias
    curve = "log1p_square"
