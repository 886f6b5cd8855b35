"""Head scale: one learned temperature per head (Wang et al. 2024, section 4), by which NoPE reaches further.

scores = scale[h] content            scale from 1; the paper trains nothing else, on a model without positions
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings.base import AttentionShape, Encoding, Tokens
from lengthwise.token_layout import TokenLayout, Window


class HeadScale(Encoding):
    """A factor per head."""

    paper = "Wang et al. 2024, arXiv 2404.12224"
    by_head = ("scale",)
    symmetric = True

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.scale = nn.Parameter(torch.empty(shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All 1."""
        nn.init.ones_(self.scale)

    def logit_scale(
        self, x: Tokens, layout: TokenLayout, *, window: Window | None = None
    ) -> Float[Tensor, "1 head query"]:
        """The same for every query."""
        return at_least_float32(self.scale)[None, :, None].expand(-1, -1, layout.query_count)
