"""GRAPE-M: multiplicative group positions (Zhang et al. 2025, section 3): RoPE with frequencies that are learned.

    grape-m       pair k turns by  i * exp(log_frequency[k])
    grape-m-ctx   pair k turns by  phase[i] * exp(log_frequency[k]),   phase[i] = sum of step[t] over t < i,
                  step = sigmoid((W x + b) / 16), one for all heads

Frequencies start as RoPE's and are shared by the heads, or each head has its own (`per_head`). The README of the code
says softplus and a first step of 0.001; the code itself has the sigmoid, which with that bias starts at 0.39, and so
have we. The planes stay those of RoPE, as in the code; two-sided both are as they are under causality.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32, has_float64
from lengthwise.encodings._rotary import (
    check_even,
    check_turned,
    plain_frequencies,
    summed_angles,
    turn,
    turn_both,
    waves_of,
)
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
    reset_linear,
)
from lengthwise.errors import check_flag, check_number
from lengthwise.token_layout import TokenLayout

PAPER = "Zhang et al. 2025, arXiv 2512.07805"


class GrapeM(Encoding):
    """RoPE that learns how fast its pairs turn."""

    paper = PAPER
    tables = ("log_frequency",)

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0, per_head: bool = False) -> None:
        super().__init__(shape)
        check_even("grape-m", shape)
        check_number("base", base, "10000 is usual.")
        check_flag("per_head", per_head)
        self.base = base
        self.log_frequency = nn.Parameter(torch.empty(shape.heads if per_head else 1, shape.head_dim // 2))
        self.by_head = ("log_frequency",) if per_head else ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """RoPE's frequencies."""
        with torch.no_grad():
            self.log_frequency.copy_(plain_frequencies(self.base, self.shape, torch.device("cpu")).log())

    def frequency(self) -> Float[Tensor, "#head 1 pair"]:
        """Radians per step, positive."""
        return at_least_float32(self.log_frequency).exp()[:, None]

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by their positions."""
        check_turned(q, k, layout, self.shape, own_heads=self.log_frequency.shape[0] > 1)
        frequency = self.frequency()
        query, key = (
            waves_of(positions[:, None, :, None].to(frequency.dtype) * frequency, frequency.dtype)
            for positions in (layout.query, layout.key)
        )
        return turn(q, query), turn(k, key)


class GrapeMContext(GrapeM):
    """GRAPE-M whose tokens choose how far they move all pairs."""

    paper = PAPER
    turns_last = True
    temperature = 16.0
    """What the gate's input is divided by, as in the code."""

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0, per_head: bool = False) -> None:
        super().__init__(shape, base=base, per_head=per_head)
        self.to_step = nn.Linear(shape.width, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """RoPE's frequencies, N(0, 0.02), and the code's bias: the inverse softplus of 0.001."""
        super().reset_parameters()
        if hasattr(self, "to_step"):  # not yet when the base class calls
            reset_linear(self.to_step)
            nn.init.constant_(self.to_step.bias, math.log(math.expm1(0.001)))

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """The steps, the same for every head; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        step = masked_tokens((project(self.to_step, x) / self.temperature).sigmoid(), key_mask)
        return {"step": step.expand(-1, self.shape.heads, -1)}

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by the sum of the steps before them."""
        per_head = self.log_frequency.shape[0] > 1
        check_turned(q, k, layout, self.shape, own_heads=per_head)
        step = checked_state(state, "step", q.shape[0], self.shape.heads, layout.key_count)[..., None]
        step = step if per_head else step[:, :1]
        # Whole turns are only whole in angles: where sums drop them, frequencies must be in what is summed.
        turned = (step.double() if has_float64(step.device) else step) * self.frequency()
        return turn_both(q, k, summed_angles(turned, layout) - turned, layout)
