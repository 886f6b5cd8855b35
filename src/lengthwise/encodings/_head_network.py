"""What DAPE and its second version share: a small network that corrects another encoding's scores.

    scores = A + B + f([A; B])         A the content, B the bias, both 0 where the mask hides a key

f is Conv2d(2 heads, 32) - LeakyReLU - Conv2d(32, heads) along the heads, with a kernel over the keys of a row.
"""

from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor, nn

from lengthwise.bias import Bias
from lengthwise.encodings.base import Encoding, Geometry, State, Tokens, reset_linear
from lengthwise.encodings.registry import build
from lengthwise.errors import check_int
from lengthwise.rescore import HeadNetwork
from lengthwise.token_layout import TokenLayout


class ScoreNetwork(Encoding):
    """Another encoding's bias, corrected by a small network that sees the content beside it."""

    kernel: ClassVar[tuple[int, int]]
    """How many rows and keys the network sees at once."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        over: str = "kerple",
        over_options: Mapping[str, object] | None = None,
        hidden: int = 32,
    ) -> None:
        super().__init__(geometry)
        check_int("hidden", hidden, "The paper has 32.")
        self.over = build(over, geometry, over_options or {})
        if not self.over.overrides("bias") or self.over.overrides("rescore"):
            raise ValueError(
                f"{type(self).__name__} must be over an additive encoding, e.g. over='kerple' or over='cable', got "
                f"{over!r}"
            )
        self.kind, self.context_free = self.over.kind, self.over.context_free
        padding = (0, self.kernel[1] // 2)
        self.into = nn.Conv2d(2 * geometry.heads, hidden, self.kernel, padding=padding)
        self.out = nn.Conv2d(hidden, geometry.heads, self.kernel, padding=padding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The network as the rest of GPT-2; what it corrects, as it says."""
        self.over.reset_parameters()
        reset_linear(self.into)
        reset_linear(self.out)

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State | None:
        """The state of what it corrects."""
        return self.over.state(x, key_mask)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias | None:
        """The bias of what it corrects."""
        return self.over.bias(x, layout, state)

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> HeadNetwork:
        """A + B + f([A; B])."""
        assert self.into.bias is not None
        assert self.out.bias is not None
        return HeadNetwork(self.into.weight.squeeze(2), self.into.bias, self.out.weight.squeeze(2), self.out.bias)
