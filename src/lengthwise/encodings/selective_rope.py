"""Selective RoPE (Movahedi et al. 2025, section 4): every pair of every head turns by what the tokens say.

    phi[t]         = conv(W_2 W_1 norm(x[t]))       head_dim / 2 numbers per head; norm: each head's slice of x to 1
    angle[k] of m  = base ** (-2k / head_dim) * sum of phi[t, k] over t <= m

W_1 has `rank` rows, the convolution `taps` tokens back, itself included, each channel by itself. The authors also have
a gate per head and a bias, off by default, which are not here. They normalise queries and keys after turning them.

The state is what enters the convolution, head_dim / 2 numbers per token and head: as many again as half the keys. Sums
are float64. Causal only: the convolution looks back.
"""

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings._convolution import convolved, reset_convolution
from lengthwise.encodings._rotary import check_even, check_turned, plain_frequencies, summed_angles, turn_both
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    Keys,
    Queries,
    State,
    Tokens,
    checked_state,
    checked_tokens,
    masked_tokens,
    project,
)
from lengthwise.errors import check_int, check_number
from lengthwise.token_layout import TokenLayout


class SelectiveRope(Encoding):
    """Angles that tokens choose, pair by pair."""

    paper = "Movahedi et al. 2025, arXiv 2511.17388"
    by_head = ("up.weight", "taps")
    turns_last = True
    two_sided = False
    windowed = False
    tables = ("taps",)

    def __init__(self, shape: AttentionShape, *, base: float = 500_000.0, rank: int = 16, taps: int = 4) -> None:
        super().__init__(shape)
        check_even("selective-rope", shape)
        check_number("base", base, "The authors have 500000.")
        check_int("rank", rank, "The authors have 16.")
        check_int("taps", taps, "The authors have 4.")
        if shape.width % shape.heads:
            raise ValueError(f"heads must divide the width, got {shape.heads} and {shape.width}")
        self.base, self.slices = base, shape.heads
        pairs = shape.head_dim // 2
        self.down = nn.Linear(shape.width, rank, bias=False)
        self.up = nn.Linear(rank, shape.heads * pairs, bias=False)
        self.taps = nn.Parameter(torch.empty(shape.heads, pairs, taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Torch's own start of linear layers and convolutions, as the authors'."""
        self.down.reset_parameters()
        self.up.reset_parameters()
        reset_convolution(self.taps)

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """What enters the convolution; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        heads = at_least_float32(x).unflatten(2, (self.slices, -1))
        normed = heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        phase = project(self.up, project(self.down, normed.flatten(2)).transpose(1, 2))
        return {"phase": masked_tokens(phase.unflatten(1, (self.shape.heads, -1)).transpose(2, 3), key_mask)}

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by the sums so far."""
        shape = self.shape
        check_turned(q, k, layout, shape, own_heads=True)
        phase = checked_state(state, "phase", q.shape[0], shape.heads, layout.key_count, shape.head_dim // 2)
        step = convolved(phase, self.taps, layout) * plain_frequencies(self.base, shape, q.device)
        # Padding takes no step, whatever the tokens before it.
        return turn_both(q, k, summed_angles(masked_tokens(step, layout.key_mask), layout), layout)
