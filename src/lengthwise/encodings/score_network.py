"""What DAPE and its second version share: a small network that corrects another encoding's scores.

    scores = A + B + f([A; B])         A the content, B the bias, both 0 where the mask forbids

f is Conv2d(2 heads, 32) - LeakyReLU - Conv2d(32, heads) along the heads, with a kernel over the keys of a row.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import Bias
from lengthwise.checks import check_whole
from lengthwise.encodings.base import Encoding, Geometry, Slot, State, Tokens, reset_linear
from lengthwise.encodings.positions import Positions
from lengthwise.encodings.registry import build


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
        check_whole("hidden", hidden, "The paper has 32.")
        self.over = build(over, geometry, over_options or {})
        if not self.over.overrides("bias") or self.over.overrides("rescore"):
            raise ValueError(
                f"{type(self).__name__} corrects an additive encoding; {over!r} acts by {self.over.hook()}. "
                "Take one that has, e.g. over='kerple' or over='cable'."
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

    def bias(
        self, x: Tokens, query: Positions, key: Positions, state: State | None = None, start: Slot | None = None
    ) -> Bias | None:
        """The bias of what it corrects."""
        return self.over.bias(x, query, key, state, start)

    def rescore(
        self,
        content: Float[Tensor, "batch head row key"],
        bias: Float[Tensor, "batch head row key"],
        q: Float[Tensor, "batch head row dim"],
        mask: Bool[Tensor, "#batch 1 row key"],
    ) -> Float[Tensor, "batch head row key"]:
        """A + B + f([A; B]); what the mask forbids is 0 before either layer."""
        both = torch.cat([content, bias], 1)
        hidden = F.leaky_relu(_convolve(self.into, both)).masked_fill(~mask, 0)
        return content + bias + _convolve(self.out, hidden)


def _convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    weight, bias = layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype)
    return F.conv2d(x, weight, bias, padding=layer.padding)
