"""The forgetting transformer (Lin et al. 2025, section 3): a forget gate inside softmax attention.

bias[i, j] = sum of logsigmoid(W x[l] + b) over j < l <= i
           = -|level[i] - level[j]|          level = cumulative sum of softplus(-(W x + b))
"""

import torch.nn.functional as F

from lengthwise.bias import LevelBias
from lengthwise.encodings._cumulative import Levels, StepEncoding
from lengthwise.encodings.base import AttentionShape, Tokens, project


class Fox(StepEncoding):
    """Every token multiplies all before it by its gate."""

    paper = "Lin et al. 2025, arXiv 2503.02130"
    kind = LevelBias
    two_sided = False

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)  # it has one side

    def step(self, x: Tokens) -> Levels:
        """-logsigmoid(W x + b)."""
        return F.softplus(-project(self.to_step, x))
