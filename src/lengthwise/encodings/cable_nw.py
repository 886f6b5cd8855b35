"""CABLE without weights (Veisi et al. 2025, "CABLE-NW"): the steps of CABLE, and slope 1 for every query.

    bias[i, j] = -|level[i] - level[j]|          level = cumulative sum of relu(W_c x + b_c)

With softplus in place of relu this is the forgetting transformer, `fox`.
"""

import torch.nn.functional as F

from lengthwise.bias import LevelBias
from lengthwise.encodings._cumulative import Levels, StepEncoding
from lengthwise.encodings.base import Tokens, project


class CableNoWeights(StepEncoding):
    """Tokens choose how far they move; all queries forget alike."""

    paper = "Veisi et al. 2025, arXiv 2503.08067"
    kind = LevelBias

    def step(self, x: Tokens) -> Levels:
        """relu(W_c x + b_c)."""
        return F.relu(project(self.to_step, x))
