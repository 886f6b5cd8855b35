"""What CABLE, FoX and their kin share: every token takes a step, and a token's level is the sum of the steps so far.

    level[b, h, i] = sum of step[b, h, l] over l <= i

What is cached is the step, never the sum: levels are a float64 sum over all cached steps in one pass as in decoding,
so both are the same to the last bit. Masked tokens take no step. The sum runs on across packed documents: only
differences inside one are ever read, and it stays monotone.
"""

from abc import abstractmethod
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import Bias, LevelBias, StepBias, wide
from lengthwise.checks import came, check_tensor
from lengthwise.encodings.base import (
    Encoding,
    Geometry,
    Slot,
    State,
    Tokens,
    checked_count,
    checked_tokens,
    project,
    reset_linear,
)
from lengthwise.encodings.positions import Positions, checked_positions

Levels = Float[Tensor, "batch head position"]


class StepEncoding(Encoding):
    """An encoding whose distance between two tokens is how far the tokens between them walk."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.to_step = nn.Linear(geometry.width, geometry.heads)
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
        checked_tokens(x, self.geometry.width)
        step = self.step(x)
        if key_mask is None:
            return {"step": step}
        check_tensor("key_mask", key_mask, ("batch", x.shape[1]), "bool", "True for tokens, False for padding.")
        if key_mask.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"key_mask must have a row for each of {x.shape[0]} sequences, or one; its shape is "
                f"{tuple(key_mask.shape)}. Give one entry per token."
            )
        return {"step": step.where(key_mask[:, None], 0)}

    def slope(self, x: Tokens, queries: int) -> Float[Tensor, "#batch #head #query"]:
        """How steeply each query forgets, from the last of x: all alike."""
        return wide(x.new_ones(1, 1, 1))

    def bias(
        self, x: Tokens, query: Positions, key: Positions, state: State | None = None, start: Slot | None = None
    ) -> Bias:
        """-slope |level - level|."""
        step, queries = self._checked(x, query, key, state, start)
        slope = self.slope(x, queries)
        eager = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if state is not None and eager and not isinstance(start, Tensor):
            return StepBias(step, slope, step.shape[2] - queries if start is None else start, queries)
        return LevelBias(*_levels(step, queries, start), slope)

    def levels(
        self, x: Tokens, query: Positions, key: Positions, state: State | None, start: Slot | None
    ) -> tuple[Levels, Levels]:
        """The levels of queries and of keys, float64."""
        return _levels(*self._checked(x, query, key, state, start), start)

    def _checked(
        self, x: Tokens, query: Positions, key: Positions, state: State | None, start: Slot | None
    ) -> tuple[Levels, int]:
        """The steps of all keys, and how many queries there are."""
        query, key = checked_positions(query, key)
        queries, keys = query.shape[1], key.shape[1]
        checked_tokens(x, self.geometry.width)
        checked_count(x, *((key, "key") if state is None else (query, "query")))
        if queries > keys or (isinstance(start, int) and not 0 <= start <= keys - queries):
            raise ValueError(
                f"queries have slots among the keys; {queries} queries from start={start} and {keys} keys came. "
                "Pass the positions of all keys, old and new."
            )
        return self._checked_step(x, keys, state), queries

    def _checked_step(self, x: Tokens, keys: int, state: State | None) -> Levels:
        if state is None:
            return self.state(x)["step"]
        if not isinstance(state, dict) or "step" not in state:
            has = f"a dictionary of {sorted(state)}" if isinstance(state, dict) else came(state)
            raise ValueError(f"the state must be a dictionary with 'step'; {has} came. Pass encoding.state(x).")
        step = state["step"]
        if step.ndim == 3 and step.shape[2] != keys:
            raise ValueError(
                f"the state must cover all keys, old and new; it has {step.shape[2]} tokens and there are {keys} keys. "
                "Append encoding.state(x) of the new tokens to the cached state before asking for the bias."
            )
        axes = (x.shape[0], self.geometry.heads, keys)
        check_tensor("the state's step", step, axes, "floating-point", "Pass encoding.state(x) of all tokens.")
        return step


class SlopedStepEncoding(StepEncoding):
    """Steps of relu(W_c x + b_c), and a slope that every query chooses for itself."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.to_slope = nn.Linear(geometry.width, geometry.heads)
        self.reset_parameters()

    def step(self, x: Tokens) -> Levels:
        """relu(W_c x + b_c)."""
        return project(self.to_step, x).relu()

    def slope(self, x: Tokens, queries: int) -> Levels:
        """softplus(W_s x + b_s) of the queries, which are the last of x."""
        return of_queries(F.softplus(project(self.to_slope, x)), queries)


def _levels(step: Levels, queries: int, start: Slot | None) -> tuple[Levels, Levels]:
    key_level = step.cumsum(2, dtype=torch.float64)
    return of_queries(key_level, queries, start), key_level


def of_queries(values: Levels, queries: int, start: Slot | None = None) -> Levels:
    """The entries that belong to the queries: those from slot `start` on, or the last ones."""
    if isinstance(start, Tensor):
        return values.index_select(2, start + torch.arange(queries, device=start.device))
    first = values.shape[2] - queries if start is None else start
    return values if queries == values.shape[2] else values[..., first : first + queries]
