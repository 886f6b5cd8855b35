"""A learned sink (OpenAI 2025, gpt-oss): a logit per head that takes weight and gives no value.

    weights = exp(scores) / (sum of exp(scores) + exp(sink[h]))

so that a head may attend to nothing. It is not scaled, capped or masked; attention costs the same. It starts at
N(0, 0.02) as in gpt-oss, or at 0 as in Granite (`start="zero"`), where it takes the weight of one key with score 0.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings.base import AttentionShape, Encoding, Tokens
from lengthwise.errors import check_choice


class Sink(Encoding):
    """A key that is always there, with a learned score and no value."""

    paper = "OpenAI 2025, arXiv 2508.10925"
    by_head = ("logit",)
    symmetric = True

    def __init__(self, shape: AttentionShape, *, start: Literal["normal", "zero"] = "normal") -> None:
        super().__init__(shape)
        check_choice("start", start, ("normal", "zero"), "gpt-oss has 'normal', Granite 'zero'.")
        self.start = start
        self.logit = nn.Parameter(torch.empty(shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), or 0."""
        nn.init.normal_(self.logit, std=0.02 if self.start == "normal" else 0.0)

    def sink(self, x: Tokens) -> Float[Tensor, " head"]:
        """The logit of each head."""
        return at_least_float32(self.logit)
