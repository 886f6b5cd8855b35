"""CABLE: context-aware biases for length extrapolation (Veisi et al. 2025, section 3), and the paper's two variants.

    step  = relu(W_c x + b_c)            how far each token moves the reader: our step is the paper's f
    level = cumulative sum of step       the paper's S
    slope = softplus(W_s x + b_s)        how steeply this query forgets: the paper's g

    cable      bias[i, j] = -slope[i] |level[i] - level[j]|
    cable-nw   bias[i, j] = -|level[i] - level[j]|                             "CABLE-NW": all queries forget alike
    k-cable    bias[i, j] = -slope[i] log(1 + (level[i] - level[j]) ** 2)      "K-CABLE": under KERPLE's logarithm

The paper prints the opposite sign; its text and its code mean this one. ALiBi is step = 1 and a fixed slope. CABLE-NW
with softplus in place of relu is the forgetting transformer, `fox`.

Two-sided, the sides are `apart`: between two tokens those steps count that come after the left one, up to the right
one. Where they are `alike`, half of both tokens' own steps counts: level = cumulative sum of step - step / 2.
"""

import torch.nn.functional as F

from lengthwise.bias import LevelBias
from lengthwise.encodings._cumulative import Levels, SlopedStepEncoding, StepEncoding
from lengthwise.encodings.base import Tokens, project

PAPER = "Veisi et al. 2025, arXiv 2503.08067"


class Cable(SlopedStepEncoding):
    """Tokens choose how far they move, queries how steeply they forget."""

    paper = PAPER
    kind = LevelBias


class CableNoWeights(StepEncoding):
    """Tokens choose how far they move; all queries forget alike."""

    paper = PAPER
    kind = LevelBias

    def step(self, x: Tokens) -> Levels:
        """relu(W_c x + b_c)."""
        return F.relu(project(self.to_step, x))


class KCable(SlopedStepEncoding):
    """CABLE whose forgetting slows down with distance."""

    paper = PAPER
    kind = LevelBias
    curve = "log1p_square"
