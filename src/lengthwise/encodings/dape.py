"""DAPE: data-adaptive positional encoding, and its second version, to be composed with an additive encoding.

    scores = A + B + f([A; B])         A the content, B the bias, both 0 where the mask hides a key

    dape     f sees one query and key at a time, across the heads (Zheng et al. 2024, equation 3):
             Linear(2 heads, 32) - LeakyReLU - Linear(32, heads)
    dapev2   f also sees each key's two neighbours in its row (Zheng et al. 2024b, equation 4):
             Conv2d(2 heads, 32, (1, 3)) - LeakyReLU - Conv2d(32, heads, (1, 3))

"kerple+dapev2" is the paper's own choice; alone, without a bias, B is 0.

What the mask hides is 0 before either layer. The authors zero only the first one's input, so that theirs sees one
column past the diagonal, which a cached decoder does not have, and would differ from itself there.
"""

from typing import ClassVar

from torch import nn

from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens, reset_linear
from lengthwise.errors import check_int
from lengthwise.rescore import HeadNetwork
from lengthwise.token_layout import TokenLayout


class ScoreNetwork(Encoding):
    """A small network that sees the content beside the bias of the encodings it is composed with."""

    kernel: ClassVar[tuple[int, int]]
    """How many rows and keys the network sees at once."""

    def __init__(self, shape: AttentionShape, *, hidden: int = 32) -> None:
        super().__init__(shape)
        check_int("hidden", hidden, "The paper has 32.")
        padding = (0, self.kernel[1] // 2)
        self.into = nn.Conv2d(2 * shape.heads, hidden, self.kernel, padding=padding)
        self.out = nn.Conv2d(hidden, shape.heads, self.kernel, padding=padding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the rest of GPT-2."""
        reset_linear(self.into)
        reset_linear(self.out)

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> HeadNetwork:
        """A + B + f([A; B])."""
        assert self.into.bias is not None
        assert self.out.bias is not None
        return HeadNetwork(self.into.weight.squeeze(2), self.into.bias, self.out.weight.squeeze(2), self.out.bias)


class Dape(ScoreNetwork):
    """A network that sees one query and key at a time, across the heads."""

    paper = "Zheng et al. 2024, arXiv 2405.14722"
    symmetric = True
    kernel = (1, 1)


class DapeV2(ScoreNetwork):
    """DAPE whose network also sees the keys next to each key."""

    paper = "Zheng et al. 2024, arXiv 2410.04798"
    kernel = (1, 3)
