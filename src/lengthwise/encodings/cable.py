"""CABLE: context-aware biases for length extrapolation (Veisi et al. 2025, section 3).

    step  = relu(W_c x + b_c)            how far each token moves the reader: our step is the paper's f
    level = cumulative sum of step       the paper's S
    slope = softplus(W_s x + b_s)        how steeply this query forgets: the paper's g
    bias[i, j] = -slope[i] |level[i] - level[j]|

The paper prints the opposite sign; its text and its code mean this one. ALiBi is step = 1 and a fixed slope.
"""

from lengthwise.bias import LevelBias
from lengthwise.encodings._cumulative import SlopedStepEncoding


class Cable(SlopedStepEncoding):
    """Tokens choose how far they move, queries how steeply they forget."""

    paper = "Veisi et al. 2025, arXiv 2503.08067"
    kind = LevelBias
