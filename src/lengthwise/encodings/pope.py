"""PoPE: polar positions (Gopalakrishnan et al. 2025, section 3): content in the length of a channel, position in its
angle.

    q'[c] = softplus(q[c]) exp(i m f[c])         k'[c] = softplus(k[c]) exp(i (n f[c] + delta[h, c]))
    score = scale * sum over c of softplus(q[c]) softplus(k[c]) cos((m - n) f[c] - delta[h, c])

with a frequency for every channel, f[c] = base ** (-c / head_dim), and learned delta in [-2 pi, 0], from 0. q and k
become twice as wide, so q.k costs twice as much; values and the cache do not grow, since keys are cached before. The
scale is the model's, 1 / sqrt(head_dim): the paper does not print its own. Give it to `attend` as scale=, which else
takes the doubled width. There is no authors' code.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings._rotary import check_turned, waves_of
from lengthwise.encodings.base import AttentionShape, Encoding, Keys, Queries, State
from lengthwise.errors import check_number
from lengthwise.token_layout import TokenLayout


class Pope(Encoding):
    """Channels whose length is content and whose angle is position alone."""

    paper = "Gopalakrishnan et al. 2025, arXiv 2509.10534"
    by_head = ("delta",)
    tables = ("delta",)
    turns_last = True

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0) -> None:
        super().__init__(shape)
        check_number("base", base, "10000 is usual.")
        self.base = base
        self.delta = nn.Parameter(torch.empty(shape.heads, shape.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All 0."""
        nn.init.zeros_(self.delta)

    @property
    def rotates_late(self) -> bool:
        """Whether a cache must hold keys that are not yet turned: turned ones are twice as wide."""
        return True

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Real and imaginary parts, one behind the other: twice as many channels."""
        check_turned(q, k, layout, self.shape, own_heads=True)
        delta = at_least_float32(self.delta).clamp(-2 * math.pi, 0)[:, None]
        dim = self.shape.head_dim
        frequency = self.base ** (-torch.arange(dim, dtype=delta.dtype, device=delta.device) / dim)
        query, key = (at[:, None, :, None].to(delta.dtype) * frequency for at in (layout.query, layout.key))
        return _polar(q, query), _polar(k, key + delta)


def _polar(x: Tensor, angles: Tensor) -> Tensor:
    """softplus(x) at these angles, in x's dtype."""
    length = F.softplus(at_least_float32(x))
    cos, sin = waves_of(angles, length.dtype)
    return torch.cat([length * cos, length * sin], -1).to(x.dtype)
