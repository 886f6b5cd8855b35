"""The additive term of attention, described instead of filled in.

    scores[b, h, i, j] = scale * q[b, h, i] . k[b, h, j] + bias[b, h, i, j]

Filled in, a bias costs memory quadratic in length and pushes attention off every fused kernel. A Bias keeps the few
numbers it is made of: one per distance, one per token, or a function. It is bound to one call, holds that call's
positions or levels, and is asked for by index: row i of the queries, column j of the keys. Causality, windows,
documents and padding are arguments of attention and never part of a bias.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.checks import came, check_broadcast, check_tensor

Index = slice | Int[Tensor, " index"]
"""Some rows or columns of a bias: whatever picks from one axis of a tensor."""

EVERYTHING = slice(None)

TILES: dict[str, Callable[..., Tensor]] = {}
"""Tile functions by name, so that a compiled graph can name one; `registered_tile` adds to it."""


def registered_tile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a tile function known by name, which `torch.compile` and `torch.export` need. A decorator."""
    TILES[f"{function.__module__}.{function.__qualname__}"] = function
    return function


NOTHING = nullcontext()


def wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same numbers in float32 or better: half precision cannot hold a position."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Full precision on x's device; nothing at all where there is no autocast: in decoding even that would be felt."""
    device = "cpu" if x.is_cpu else x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NOTHING


class Bias(ABC):
    """What is added to the scores of one call of attention."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""

    @property
    @abstractmethod
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that a gradient may flow to."""

    @abstractmethod
    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""

    def dense(self) -> Float[Tensor, "#batch #head query key"]:
        """The whole matrix, slow and large on purpose: the definition, for tests and pictures."""
        return self.tile(EVERYTHING, EVERYTHING)

    @property
    def needs_grad(self) -> bool:
        """Whether something in it is learned."""
        return any(source.requires_grad for source in self.sources)


@dataclass(frozen=True, eq=False)
class DistanceBias(Bias):
    """bias[b, h, i, j] = table[h, query[b, i] - key[b, j] - first], constant beyond the table's ends.

    `first` is the distance of the table's first column: 0 under causality, negative for a two-sided table.
    """

    table: Float[Tensor, "head distance"]
    query: Int[Tensor, "#batch query"]
    key: Int[Tensor, "#batch key"]
    first: int = 0

    def __post_init__(self) -> None:
        check_tensor("table", self.table, ("head", "distance"), "floating-point", "One row a head.")
        for name in ("query", "key"):
            positions = getattr(self, name)
            if isinstance(positions, Tensor) and positions.ndim == 1:
                object.__setattr__(self, name, positions[None])
            check_tensor(name, getattr(self, name), ("batch or 1", "position"), "integer", "Use torch.arange.")
        check_broadcast(
            "query and key", (self.query.shape[0], self.key.shape[0]), "batch", "Give as many rows of each."
        )
        if self.table.shape[1] == 0:
            raise ValueError("a DistanceBias needs at least one distance; its table has none. Give one column or more.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head, query, key)."""
        batch = max(self.query.shape[0], self.key.shape[0])
        return batch, self.table.shape[0], self.query.shape[1], self.key.shape[1]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The table."""
        return (self.table,)

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch head row column"]:
        """A part of the matrix, in float32 or better."""
        distance = self.query[:, rows, None] - self.key[:, None, columns]
        index = (distance - self.first).clamp(0, self.table.shape[1] - 1)
        return wide(self.table)[:, index].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class LevelBias(Bias):
    """bias[b, h, i, j] = -slope[b, h, i] * abs(query_level[b, h, i] - key_level[b, h, j]).

    Levels are float64 and their difference is taken before rounding, so that precision does not depend on how far a
    level has climbed.
    """

    query_level: Float[Tensor, "#batch #head query"]
    key_level: Float[Tensor, "#batch #head key"]
    slope: Float[Tensor, "#batch #head #query"]

    def __post_init__(self) -> None:
        parts = (self.query_level, self.key_level, self.slope)
        for name, part in zip(("query_level", "key_level", "slope"), parts, strict=True):
            check_tensor(name, part, ("batch or 1", "head or 1", "position"), "floating-point", "One number a token.")
            if name != "slope" and part.dtype != torch.float64:
                raise TypeError(
                    f"{name} must be float64; got {part.dtype}. Sum in float64: float32 rounds off what a level climbs."
                )
        batches, heads, (queries, _, slopes) = zip(*(part.shape for part in parts), strict=True)
        for what, sizes in (("batch", batches), ("heads", heads)):
            check_broadcast("levels and slope", sizes, what, "Make all of them from the same tokens.")
        if slopes not in (1, queries):
            raise ValueError(
                f"slope must have one number a query, {queries}, or 1; {slopes} came. "
                "Make it from the tokens of the queries."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        parts = (self.query_level, self.key_level, self.slope)
        batch, heads = (max(part.shape[axis] for part in parts) for axis in (0, 1))
        return batch, heads, self.query_level.shape[2], self.key_level.shape[2]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Levels and slopes."""
        return self.query_level, self.key_level, self.slope

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in the slope's precision, float32 at least."""
        slope = wide(self.slope).expand(-1, -1, self.query_level.shape[2])[..., rows, None]
        way = (self.query_level[..., rows, None] - self.key_level[..., None, columns]).abs()
        return -slope * way.to(slope.dtype)


class StepBias(LevelBias):
    """A LevelBias without gradients whose levels are running sums of steps, not summed until they are asked for.

    A decoder has the steps of thousands of tokens and needs each sum for one query; its kernel sums as it reads.
    """

    step: Float[Tensor, "batch head key"]
    start: int
    """The slot of the first query among the keys."""
    queries: int

    def __init__(self, step: Tensor, slope: Tensor, start: int, queries: int) -> None:
        vars(self).update(step=step, slope=slope, start=start, queries=queries)

    @property
    def queries_last(self) -> bool:
        """Whether no key comes after the queries."""
        return self.start + self.queries == self.step.shape[2]

    @cached_property
    def key_level(self) -> Float[Tensor, "batch head key"]:
        """The sum of the steps up to each key."""
        return self.step.cumsum(2, dtype=torch.float64)

    @cached_property
    def query_level(self) -> Float[Tensor, "batch head query"]:
        """The levels of the queries' own slots."""
        return self.key_level[:, :, self.start : self.start + self.queries]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        batch, heads, keys = self.step.shape
        return batch, heads, self.queries, keys


@dataclass(frozen=True, eq=False)
class FunctionBias(Bias):
    """bias[b, h, i, j] = function(rows, columns, *tensors), asked for tile by tile and never whole.

    `function` is pure and lives at the top of a module. Everything that may need a gradient is in `tensors`, never
    captured. The last axis of tensors[0] runs over the queries, that of tensors[1] over the keys. Decorated with
    `registered_tile` it also works at full speed under torch.compile. Where it is made of straight lines, `lines` is
    the same bias as such, for backends that are faster with it.
    """

    function: Callable[..., Float[Tensor, "#batch #head row column"]]
    tensors: tuple[Tensor, ...]
    lines: "LineBias | None" = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be a function of rows and columns; {came(self.function)} came. Write one.")
        if len(self.tensors) < 2:
            raise ValueError(
                "a FunctionBias needs tensors[0] with queries and tensors[1] with keys along the last axis; "
                f"so many came: {len(self.tensors)}. Put the call's positions or levels there."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        if self.lines is not None:
            return self.lines.shape
        batch, heads = self.tile(slice(0, 1), slice(0, 1)).shape[:2]
        return batch, heads, self.tensors[0].shape[-1], self.tensors[1].shape[-1]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The floating-point tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.is_floating_point())

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix."""
        return self.function(rows, columns, *self.tensors)


@dataclass(frozen=True, eq=False)
class LineBias(Bias):
    """bias[b, h, i, j] = slope[h, n] * x + intercept[h, n] if n knots are at most x = factor[b, i] * curve[b, i, j].

    A function of one number that is made of straight lines, as a small network with ReLU is. The curve has one head
    and rises with distance, factors are not negative, knots rise and the lines meet there, so that knots need no
    gradient.
    """

    curve: DistanceBias
    factor: Float[Tensor, "#batch query"]
    knots: Float[Tensor, " knot"]
    slope: Float[Tensor, "head line"]
    intercept: Float[Tensor, "head line"]

    def __post_init__(self) -> None:
        check_tensor("factor", self.factor, ("batch or 1", self.curve.query.shape[1]), "floating-point", "One a query.")
        check_tensor("knots", self.knots, ("knot",), "floating-point", "In rising order.")
        lines = self.knots.shape[0] + 1
        check_tensor("slope", self.slope, ("head", lines), "floating-point", "One more than there are knots.")
        check_tensor("intercept", self.intercept, tuple(self.slope.shape), "floating-point", "One beside each slope.")
        if self.curve.table.shape[0] != 1:
            raise ValueError(
                f"a LineBias's curve must have one head; it has {self.curve.table.shape[0]}. Lines tell heads apart."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head, query, key)."""
        batch, _, queries, keys = self.curve.shape
        return max(batch, self.factor.shape[0]), self.slope.shape[0], queries, keys

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The curve's table, the factors and the lines."""
        return self.curve.table, self.factor, self.slope, self.intercept

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch head row column"]:
        """A part of the matrix, in float32 or better."""
        x = self.factor[:, rows, None] * self.curve.tile(rows, columns)[:, 0]
        line = torch.bucketize(x.detach(), self.knots, right=True)
        return (self.slope[:, line] * x + self.intercept[:, line]).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """bias[b, h, i, j] = value[b, h, i, j]: the last resort, quadratic."""

    value: Float[Tensor, "#batch #head query key"]

    def __post_init__(self) -> None:
        axes = ("batch or 1", "head or 1", "query", "key")
        check_tensor("value", self.value, axes, "floating-point", "Add an axis for what is missing.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        batch, heads, queries, keys = self.value.shape
        return batch, heads, queries, keys

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The matrix."""
        return (self.value,)

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""
        return wide(self.value[:, :, rows][..., columns])
