"""SSMax: scalable softmax (Nakanishi 2025, section 2): scores grow with the logarithm of how many keys there are.

    scores = s[h] log(n) (content + bias)            n keys that the query sees; `offset` adds a learned b[h] to s log n

so that the largest weight does not fade as sequences grow. s is learned per head and starts at 1 / mean(log n) over the
training length (0.168 at 1,024), which makes the mean factor 1. n counts real tokens of the query's own document,
and those of the window alone. Beside a bias or another encoding it is `alibi+ssmax`; the paper warns of the offset.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings.base import AttentionShape, Encoding, Tokens
from lengthwise.errors import check_flag, check_number
from lengthwise.token_layout import TokenLayout, Window
from lengthwise.visibility import visible_counts


class SsMax(Encoding):
    """A learned factor per head on log n."""

    paper = "Nakanishi 2025, arXiv 2501.19399"
    by_head = ("scale", "offset")
    symmetric = True

    def __init__(self, shape: AttentionShape, *, start: float | None = None, offset: bool = False) -> None:
        super().__init__(shape)
        if start is not None:
            check_number("start", start, "Leave it out for a mean factor of 1; the paper's figure has 0.43.")
        check_flag("offset", offset)
        length = max(shape.train_length, 2)
        self.start = length / math.lgamma(length + 1) if start is None else start
        self.scale = nn.Parameter(torch.empty(shape.heads))
        self.offset = nn.Parameter(torch.empty(shape.heads)) if offset else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All heads alike, offset 0."""
        nn.init.constant_(self.scale, self.start)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    @classmethod
    def takes_window(cls, window: Window) -> bool:
        """Whether it counts the keys of a window: slots alone."""
        return isinstance(window, int)

    def logit_scale(
        self, x: Tokens, layout: TokenLayout, *, window: Window | None = None
    ) -> Float[Tensor, "#batch head query"]:
        """s log n, and the offset."""
        if window is not None and not isinstance(window, int):
            raise NotImplementedError(f"ssmax counts the keys of a window that is an int, got {window}")
        seen = visible_counts(layout, window)
        scale = at_least_float32(self.scale)[None, :, None]
        factor = scale * seen.to(scale.dtype).log()
        return factor if self.offset is None else factor + at_least_float32(self.offset)[None, :, None]
