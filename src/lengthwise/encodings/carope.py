"""CARoPE: context-aware rotary positions (Veisi et al. 2025, section 3).

    f[t]            = 1 / (softplus(W x[t] + b) + 1)              one number in (0, 1) per token and head
    angle[k] of m   = sum of f[t] ** k over t <= m                pair k turns by it, as RoPE's by m * frequency[k]

It starts as RoPE: W = 0 and b such that f = base ** (-2 / head_dim). Pair 0 turns by 1 a token whatever f is. Two-sided
the angle between two tokens is the sum over those between them, as under causality.

The state is f; angles are float64 sums. Costs head_dim / 2 powers and sums per token, head and pass, also for cached
tokens: keys are cached before they turn.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn

from lengthwise.encodings._rotary import check_even, check_turned, summed_angles, turn_both
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
from lengthwise.errors import check_number
from lengthwise.token_layout import TokenLayout


class Carope(Encoding):
    """Tokens choose how fast the pairs of each head turn."""

    paper = "Veisi et al. 2025, arXiv 2507.23083"
    by_head = ("to_step.weight", "to_step.bias")
    turns_last = True

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0) -> None:
        super().__init__(shape)
        check_even("carope", shape)
        check_number("base", base, "10000 is usual.")
        self.base = base
        self.to_step = nn.Linear(shape.width, shape.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W = 0, and b such that it starts as RoPE."""
        nn.init.zeros_(self.to_step.weight)
        softplus = self.base ** (2 / self.shape.head_dim) - 1
        nn.init.constant_(self.to_step.bias, softplus + math.log(-math.expm1(-softplus)))

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """f; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        return {"step": masked_tokens(1 / (F.softplus(project(self.to_step, x)) + 1), key_mask)}

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by the sums of the powers of all steps so far."""
        check_turned(q, k, layout, self.shape, own_heads=True)
        step = checked_state(state, "step", q.shape[0], self.shape.heads, layout.key_count)[..., None]
        real = step > 0
        powers = step.where(real, 1) ** torch.arange(self.shape.head_dim // 2, device=step.device)
        # Padding takes no step, in no pair: 0 ** 0 would be one.
        return turn_both(q, k, summed_angles(powers.where(real, 0), layout), layout)
