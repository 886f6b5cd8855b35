"""Biases by distance: a table, a mix of curves that every query or key chooses, and straight lines in one curve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.bias.base import LEAST_FALL, Axes, Bias, Index, block_peaks
from lengthwise.bias.description import described
from lengthwise.bias.precision import at_least_float32
from lengthwise.errors import check_broadcast, check_choice, check_tensor

Side = Literal["query", "key"]
"""Whose vectors meet the profiles."""

Beyond = Literal["clamp", "zero"]
"""What a distance outside of a table has: its end, or nothing."""

FEW_ROWS = 4
"""Up to so many queries meet a column of the profiles each, instead of all keys all columns: as in decoding."""


@described
@dataclass(frozen=True, eq=False)
class DistanceBias(Bias):
    """bias[b, h, i, j] = table[h, query[b, i] - key[b, j] - first], constant beyond the table's ends.

    `first` is the distance of the table's first column: 0 under causality, negative for a two-sided table.
    """

    table: Float[Tensor, "head distance"]
    query: Int[Tensor, "#batch query"]
    key: Int[Tensor, "#batch key"]
    first: int = 0

    _by_sequence: ClassVar = ("query", "key")
    _axes: ClassVar = {"table": {"head": 0}, "query": {"query": 1}, "key": {"key": 1}}

    def __post_init__(self) -> None:
        check_tensor("table", self.table, ("head", "distance"), "floating-point")
        _check_positions(self)
        if self.table.shape[1] == 0:
            raise ValueError("a DistanceBias's table must have at least one distance, got none")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head, query, key)."""
        batch = max(self.query.shape[0], self.key.shape[0])
        return batch, self.table.shape[0], self.query.shape[1], self.key.shape[1]

    def positions(self) -> tuple[Tensor, Tensor]:
        """Queries' and keys'."""
        return self.query, self.key

    @property
    def is_uniform(self) -> bool:
        """Whether queries and keys stand one apart."""
        return all(bool((x.diff() == 1).all()) for x in (self.query, self.key))

    def key_peaks(self, width: int, count: int) -> dict[str, Tensor] | None:
        """The last position of each block, where the table falls so far that a weight could vanish."""
        table = self.table.detach()
        if not (table.amax(1) - table.amin(1)).amax() > LEAST_FALL:
            return None
        return {"key": block_peaks(self.key, width, count)}

    def ceiling(self, peaks: Mapping[str, Tensor]) -> Float[Tensor, "#batch head query block"]:
        """The largest number of the table from the nearest distance on."""
        nearest = self.query[:, :, None] - peaks["key"][:, None] - self.first
        largest = at_least_float32(self.table.detach()).flip(1).cummax(1).values.flip(1)
        return picked_columns(largest, nearest.clamp(0, self.table.shape[1] - 1)).transpose(0, 1)

    def first_sequence(self) -> "DistanceBias":
        """Without the distances at the table's end that the first sequence does not have."""
        own = super().first_sequence()
        return own.rebuilt({"table": _reached(own, own.table)})

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch head row column"]:
        """A part of the matrix, in float32 or better."""
        distance = self.query[:, rows, None] - self.key[:, None, columns]
        index = (distance - self.first).clamp(0, self.table.shape[1] - 1)
        return picked_columns(at_least_float32(self.table), index).transpose(0, 1)


def _check_positions(bias: "DistanceBias | QueryDistanceBias") -> None:
    """An error unless query and key are positions of as many sequences; positions of one become a row."""
    for name in ("query", "key"):
        positions = getattr(bias, name)
        if isinstance(positions, Tensor) and positions.ndim == 1:
            object.__setattr__(bias, name, positions[None])
        check_tensor(name, getattr(bias, name), ("batch or 1", "position"), "integer")
    check_broadcast("query and key", (bias.query.shape[0], bias.key.shape[0]), "batch")


def _reached(bias: "DistanceBias | QueryDistanceBias", table: Tensor) -> Float[Tensor, "*axis distance"]:
    """Some distances without those at the end that no query has to any key, in float32 or better."""
    if not bias.query.numel() or not bias.key.numel():
        return at_least_float32(table)
    return at_least_float32(table[..., : max(1, int(bias.query.max() - bias.key.min()) - bias.first + 1)])


def picked_columns(table: Float[Tensor, "head column"], index: Int[Tensor, "*shape"]) -> Float[Tensor, "head *shape"]:
    """table[:, index], with a gradient that a CPU always sums in the same order, which indexing does not promise."""
    return table.gather(1, index.reshape(1, -1).expand(table.shape[0], -1)).view(table.shape[0], *index.shape)


@described
@dataclass(frozen=True, eq=False)
class QueryDistanceBias(Bias):
    """bias[b, h, i, j] = rows[b, h, i] . profiles[h, :, query[b, i] - key[b, j] - first], a mix of curves by distance.

    Every query mixes the profiles anew; with side="key" every key does, with rows[b, h, j]. Distances beyond the
    profiles have their ends, or with beyond="zero" no bias.
    """

    rows: Float[Tensor, "#batch #head token profile"]
    profiles: Float[Tensor, "#head profile distance"]
    query: Int[Tensor, "#batch query"]
    key: Int[Tensor, "#batch key"]
    first: int = 0
    side: Side = "query"
    beyond: Beyond = "clamp"

    _by_sequence: ClassVar = ("rows", "query", "key")

    def __post_init__(self) -> None:
        check_choice("side", self.side, get_args(Side))
        check_choice("beyond", self.beyond, get_args(Beyond))
        _check_positions(self)
        tokens = getattr(self, self.side).shape[1]
        check_tensor("profiles", self.profiles, ("head or 1", "profile", "distance"), "floating-point")
        axes = ("batch or 1", "head or 1", tokens, self.profiles.shape[1])
        check_tensor("rows", self.rows, axes, "floating-point", f"One for each {self.side}.")
        check_broadcast("rows and profiles", (self.rows.shape[1], self.profiles.shape[0]), "heads")
        check_broadcast("rows and positions", [x.shape[0] for x in (self.rows, self.query, self.key)], "batch")
        if self.profiles.shape[2] == 0:
            raise ValueError("a QueryDistanceBias's profiles must have at least one distance, got none")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        batch = max(x.shape[0] for x in (self.rows, self.query, self.key))
        heads = max(self.rows.shape[1], self.profiles.shape[0])
        return batch, heads, self.query.shape[1], self.key.shape[1]

    def positions(self) -> tuple[Tensor, Tensor]:
        """Queries' and keys'."""
        return self.query, self.key

    def axes(self) -> dict[str, Axes]:
        """Rows are those of one side."""
        return {
            "rows": {"head": 1, self.side: 2},
            "profiles": {"head": 0},
            "query": {"query": 1},
            "key": {"key": 1},
        }

    def first_sequence(self) -> "QueryDistanceBias":
        """Without the distances at the profiles' end that the first sequence does not have."""
        own = super().first_sequence()
        return own.rebuilt({"rows": at_least_float32(own.rows), "profiles": _reached(own, own.profiles)})

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""
        distance = self.query[:, rows, None] - self.key[:, None, columns] - self.first
        index = distance.clamp(0, self.profiles.shape[2] - 1)
        own, profiles = at_least_float32(self.rows), at_least_float32(self.profiles)
        dtype = torch.promote_types(own.dtype, profiles.dtype)
        own, profiles = own[:, :, rows if self.side == "query" else columns].to(dtype), profiles.to(dtype)
        if self.side == "query":
            value = _picked_distances(own @ profiles, index)
        elif index.shape[1] <= FEW_ROWS and not torch.compiler.is_compiling():
            met = picked_columns(profiles.flatten(0, 1), index).unflatten(0, profiles.shape[:2])
            value = (own[:, :, None] * met.permute(2, 0, 3, 4, 1)).sum(-1)
        else:
            value = _picked_distances(own @ profiles, index.transpose(1, 2)).transpose(2, 3)
        return value if self.beyond == "clamp" else value.where((distance == index)[:, None], 0)


def _picked_distances(
    values: Float[Tensor, "#batch head token distance"], index: Int[Tensor, "#batch token other"]
) -> Float[Tensor, "#batch head token other"]:
    """values[b, h, n, index[b, n, m]], with a gradient that is always summed in the same order."""
    batch, heads = values.shape[0] if index.shape[0] == 1 else index.shape[0], values.shape[1]
    return values.expand(batch, -1, -1, -1).gather(3, index[:, None].expand(batch, heads, -1, -1))


@described
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

    _by_sequence: ClassVar = ("curve.query", "curve.key", "factor")
    _axes: ClassVar = {
        "curve.query": {"query": 1},
        "curve.key": {"key": 1},
        "factor": {"query": 1},
        "slope": {"head": 0},
        "intercept": {"head": 0},
    }

    def __post_init__(self) -> None:
        check_tensor("factor", self.factor, ("batch or 1", self.curve.query.shape[1]), "floating-point")
        check_tensor("knots", self.knots, ("knot",), "floating-point")
        check_tensor("slope", self.slope, ("head", self.knots.shape[0] + 1), "floating-point")
        check_tensor("intercept", self.intercept, tuple(self.slope.shape), "floating-point")
        if self.curve.table.shape[0] != 1:
            raise ValueError(f"a LineBias's curve must have one head, got {self.curve.table.shape[0]}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head, query, key)."""
        batch, _, queries, keys = self.curve.shape
        return max(batch, self.factor.shape[0]), self.slope.shape[0], queries, keys

    def positions(self) -> tuple[Tensor, Tensor]:
        """The curve's."""
        return self.curve.positions()

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch head row column"]:
        """A part of the matrix, in float32 or better."""
        x = self.factor[:, rows, None] * self.curve.tile(rows, columns)[:, 0]
        line = torch.bucketize(x.detach(), self.knots, right=True)
        return (picked_columns(self.slope, line) * x + picked_columns(self.intercept, line)).transpose(0, 1)
