"""What CABLE, FoX and their kin share: every token takes a step, and a token's level is the sum of the steps so far.

    level[b, h, i] = sum of step[b, h, l] over l <= i

What is cached is the step, never the sum: levels are a float64 sum over all cached steps in one pass as in decoding,
so both are the same to the last bit. Masked tokens take no step. The sum runs on across packed documents: only
differences inside one are ever read, and it stays monotone.

Two-sided, the distance between two tokens is the sum of the steps after the left one, up to the right one: the sides
are told `apart`, since of the two tokens themselves the right one's step counts. Where they are `alike`, half of both
counts: a token then stands in the middle of its own step.
"""

from abc import abstractmethod
from typing import ClassVar, cast

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import Curve, LevelBias, at_least_float32
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    Sides,
    State,
    Tokens,
    are_apart,
    check_sides,
    checked_count,
    checked_state,
    checked_tokens,
    masked_tokens,
    project,
    query_tokens,
    reset_linear,
)
from lengthwise.token_layout import TokenLayout

Levels = Float[Tensor, "batch head position"]


class StepEncoding(Encoding):
    """An encoding whose distance between two tokens is how far the tokens between them walk."""

    by_head: tuple[str | tuple[str, int], ...] = ("to_step.weight", "to_step.bias")
    curve: ClassVar[Curve] = "linear"

    def __init__(self, shape: AttentionShape, *, sides: Sides = "apart") -> None:
        super().__init__(shape)
        self.symmetric = not are_apart(shape, sides)
        self.to_step = nn.Linear(shape.width, shape.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), bias 0, for all it learns."""
        for layer in self.children():
            reset_linear(cast(nn.Linear, layer))

    @abstractmethod
    def step(self, x: Tokens) -> Levels:
        """How far each token walks, 0 or more, in float32 or better."""

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """The steps; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        return {"step": masked_tokens(self.step(x), key_mask)}

    def slope(self, x: Tokens) -> Float[Tensor, "#batch #head #query"]:
        """How steeply each query forgets: all alike."""
        return at_least_float32(x.new_ones(1, 1, 1))

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> LevelBias:
        """-slope curve(|level - level|)."""
        check_sides(layout, causal=self.shape.causal)
        checked_tokens(x, self.shape.width)
        checked_count(x, *((layout.key, "key") if state is None else (layout.query, "query")))
        start, queries = layout.start, layout.query_count
        if isinstance(start, int) and not 0 <= start <= layout.key_count - queries:
            raise ValueError(
                f"{type(self).__name__} needs queries that are among the keys, got {queries} from slot {start} on and "
                f"{layout.key_count} keys; the layout must have the positions of all keys, old and new"
            )
        step = self._checked_step(x, layout, state)
        if self.symmetric and not self.shape.causal:
            if layout.ring is not None:
                raise ValueError("sides='alike' needs all tokens in one process, got a sequence that several share")
            step = (step + F.pad(step, (1, 0))[..., :-1]) / 2
        own = self.slope(query_tokens(x, layout))
        return LevelBias.of_steps(
            step,
            own,
            start=start,
            queries=queries,
            curve=self.curve,
            rising=self.shape.causal,
            ring=layout.ring,
        )

    def _checked_step(self, x: Tokens, layout: TokenLayout, state: State | None) -> Float[Tensor, "batch head key"]:
        own = self.state(x, layout.key_mask) if state is None else state
        return checked_state(own, "step", x.shape[0], self.shape.heads, layout.key_count)


class SlopedStepEncoding(StepEncoding):
    """Steps of relu(W_c x + b_c), and a slope that every query chooses for itself."""

    by_head = (*StepEncoding.by_head, "to_slope.weight", "to_slope.bias")

    def __init__(self, shape: AttentionShape, *, sides: Sides = "apart") -> None:
        super().__init__(shape, sides=sides)
        self.to_slope = nn.Linear(shape.width, shape.heads)
        self.reset_parameters()

    def step(self, x: Tokens) -> Levels:
        """relu(W_c x + b_c)."""
        return project(self.to_step, x).relu()

    def slope(self, x: Tokens) -> Levels:
        """softplus(W_s x + b_s)."""
        return F.softplus(project(self.to_slope, x))
