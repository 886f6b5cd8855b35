"""Sinusoidal absolute positions (Vaswani et al. 2017, section 3.5).

    x[b, i, 2k]     + amplitude * sin(positions[b, i] / 10000 ** (2k / width))
    x[b, i, 2k + 1] + amplitude * cos(positions[b, i] / 10000 ** (2k / width))

Vaswani's tokens are multiplied by sqrt(width) and so outweigh waves of amplitude 1. GPT-2's start at N(0, 0.02): there
the waves must be as small, or a short training sees little else. The CABLE paper's code uses 0.1.
"""

import torch

from lengthwise.encodings.base import AttentionShape, Encoding, Tokens, checked_count, checked_tokens
from lengthwise.errors import check_number
from lengthwise.token_layout import TokenLayout


class Sinusoidal(Encoding):
    """Fixed waves added to the tokens."""

    paper = "Vaswani et al. 2017, arXiv 1706.03762"
    by_head = ()

    def __init__(self, shape: AttentionShape, *, amplitude: float = 0.02) -> None:
        super().__init__(shape)
        check_number("amplitude", amplitude, "0.02 suits tokens that start at N(0, 0.02).")
        self.amplitude = amplitude

    def embed(self, x: Tokens, layout: TokenLayout) -> Tokens:
        """Tokens plus the waves at their position."""
        positions = layout.query
        width = self.shape.width
        checked_tokens(x, width)
        checked_count(x, positions, of="position")
        pairs = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
        angles = positions[..., None].float() * 10000 ** (-pairs / width)
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]
        return x + (self.amplitude * waves).to(x.dtype)
