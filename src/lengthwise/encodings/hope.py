"""HoPE: high-frequency rotary positions (Chen et al. 2024, section 4).

    as `rope`, but a pair that would not turn once within the training length, frequency < 2 pi / L, does not turn

What is left of RoPE's long waves are channels that compare content alone. It is the rule "proportional" of `rope` with
a part that follows from the training length. Two other papers call themselves HoPE; this is the one of 2024.
"""

import math

from lengthwise.encodings._rope_scaling import Frequencies
from lengthwise.encodings._rotary import PairLayout
from lengthwise.encodings.base import AttentionShape
from lengthwise.encodings.rope import Rope
from lengthwise.token_layout import Positions


class Hope(Rope):
    """Only pairs that turn fully within the training length turn at all."""

    paper = "Chen et al. 2024, arXiv 2410.21216"

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0, layout: PairLayout = "half") -> None:
        super().__init__(shape, base=base, layout=layout)

    def frequencies(self, length: Positions) -> Frequencies:
        """0 for the slow pairs."""
        plain = super().frequencies(length)
        return plain.where(plain >= 2 * math.pi / self.shape.train_length, 0)
