"""The additive term of attention, described instead of filled in.

    scores[b, h, i, j] = scale * q[b, h, i] . k[b, h, j] + bias[b, h, i, j]

Filled in, a bias costs memory quadratic in length and pushes attention off every fused kernel. A Bias keeps the few
numbers it is made of: one per distance, one per token, or a function. It is bound to one call, holds that call's
positions or levels, and is asked for by index: row i of the queries, column j of the keys. Causality, windows,
documents and padding belong to the layout and are never part of a bias.

A Bias takes itself apart, into tensors and plain values by name, and is put together again from them: operators,
files, the page and pictures all use that one description. It is a pytree.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree

from lengthwise.errors import check_broadcast, check_choice, check_tensor, describe
from lengthwise.token_layout import Ring

Index = slice | Int[Tensor, " index"]
"""Some rows or columns of a bias: whatever picks from one axis of a tensor."""

ALL = slice(None)

Static = str | int | float | bool
"""A plain value of a description; it can be written to JSON."""

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of biases and rescores by name, so that a graph or a file can name one; `registered` adds to it."""

NO_CONTEXT = nullcontext()


def registered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function known by name, which `torch.compile`, `torch.export` and files need. A decorator."""
    FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = function
    return function


def registered_name(function: Callable[..., Any]) -> str:
    """The name under which a function is registered, or nothing; by identity, which Dynamo can follow."""
    for name, known in FUNCTIONS.items():
        if known is function:
            return name
    return ""


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same numbers in float32 or better: half precision cannot hold a position."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Full precision on x's device; nothing at all where there is no autocast: in decoding even that would be felt."""
    device = "cpu" if x.is_cpu else x.device.type
    if device != "cpu" and not torch.amp.is_autocast_available(device):
        return NO_CONTEXT
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NO_CONTEXT


D = TypeVar("D", bound="Description")
"""Not Self, which beartype does not know in methods that are checked one by one."""


class Description:
    """Tensors and plain values by name, and the class: what a Bias and a Rescore are made of.

    A subclass is a frozen dataclass under `described`. Its fields are tensors, descriptions, tuples of either,
    functions or plain values; names of nested ones are joined by dots: a LineBias has "curve.table".
    """

    field_defaults: ClassVar[dict[str, Any]]
    """Its fields by name, in order, with their defaults, None where there is none; set by `described`."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything a gradient or a file needs, by name."""
        return {name: value for name, value in _parts(self) if isinstance(value, Tensor)}

    def static(self) -> dict[str, Static]:
        """The rest by name, functions by their registered names: JSON can hold it."""
        return {name: _named(value) if callable(value) else value for name, value in self.plain().items()}

    def plain(self) -> dict[str, Any]:
        """The same with functions as they are, which need no name."""
        return {name: value for name, value in _parts(self) if not isinstance(value, Tensor)}

    def rebuilt(self: D, tensors: Mapping[str, Tensor]) -> D:
        """The same description with other tensors under the same names."""
        parts = dict(_parts(self)) | dict(tensors)
        made: D = _build(type(self), parts, "", _unchecked)
        return made

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that a gradient may flow to."""
        return tuple(tensor for tensor in self.tensors().values() if tensor.is_floating_point())

    @property
    def needs_grad(self) -> bool:
        """Whether something in it is learned."""
        return any(source.requires_grad for source in self.sources)

    def detached(self: D) -> D:
        """The same without gradients."""
        return self.rebuilt({name: tensor.detach() for name, tensor in self.tensors().items()})


KINDS: dict[str, type[Description]] = {}
"""Kinds of bias and of rescore by the name of their class; `described` adds to it."""


def described(cls: type[Any]) -> type[Any]:
    """Register a dataclass as a Description: by name, and as a pytree. A decorator."""
    cls.field_defaults = {part.name: None if part.default is MISSING else part.default for part in fields(cls)}
    KINDS[cls.__name__] = cls

    def flatten(x: Any) -> tuple[list[Tensor], tuple[tuple[str, Any], ...]]:
        # Where a tensor stands is part of the structure: its name with nothing beside it.
        parts = list(_parts(x))
        return (
            [value for _, value in parts if isinstance(value, Tensor)],
            tuple((name, None if isinstance(value, Tensor) else value) for name, value in parts),
        )

    def unflatten(leaves: Any, context: tuple[tuple[str, Any], ...]) -> Any:
        remaining = iter(leaves)
        parts = {name: next(remaining) if value is None else value for name, value in context}
        return _build(cls, parts, "", _unchecked)

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__name__}")
    return cls


def rebuild(kind: str, tensors: Mapping[str, Tensor], static: Mapping[str, Static]) -> Any:
    """A description from what `tensors()` and `static()` gave, checked: it may come from a file."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return _build(KINDS[kind], {**tensors, **static}, "", lambda cls, values: cls(**(cls.field_defaults | values)))


def _parts(x: Description, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values by name; a nested description's kind is a plain value of its own."""
    for field_name in x.field_defaults:
        value, name = getattr(x, field_name), prefix + field_name
        several = isinstance(value, tuple)
        for i, single in enumerate(value if several else (value,)):
            path = f"{name}.{i}" if several else name
            if isinstance(single, Description):
                yield f"{path}.kind", type(single).__name__
                yield from _parts(single, f"{path}.")
            elif single is not None:
                yield path, single


def _build(
    cls: type[Any], parts: Mapping[str, Any], prefix: str, make: Callable[[type[Any], dict[str, Any]], Any]
) -> Any:
    values: dict[str, Any] = {}
    for field_name in cls.field_defaults:
        name = prefix + field_name
        if (single := _built_part(name, parts, make)) is not None:
            values[field_name] = single
            continue
        several: list[Any] = []
        while (single := _built_part(f"{name}.{len(several)}", parts, make)) is not None:
            several.append(single)
        if several:
            values[field_name] = tuple(several)
    return make(cls, values)


def _built_part(name: str, parts: Mapping[str, Any], make: Callable[[type[Any], dict[str, Any]], Any]) -> Any:
    if f"{name}.kind" in parts:
        return _build(KINDS[parts[f"{name}.kind"]], parts, f"{name}.", make)
    value = parts.get(name)
    if name.rpartition(".")[2] == "function" and isinstance(value, str):
        if value not in FUNCTIONS:
            raise ValueError(f"unknown function {value!r}; import the module that registers it")
        return FUNCTIONS[value]
    return value


def _unchecked(cls: type[Any], values: dict[str, Any]) -> Any:
    """What comes out of a description that was checked needs no second check, and a pytree's leaves may be anything."""
    made = object.__new__(cls)
    for name, default in cls.field_defaults.items():
        object.__setattr__(made, name, values.get(name, default))
    return made


def _named(function: Callable[..., Any]) -> str:
    name = registered_name(function)
    if not name:
        raise ValueError(f"{function.__qualname__} has no registered name; decorate it with lw.registered")
    return name


B = TypeVar("B", bound="Bias")

Axes = Mapping[Literal["head", "query", "key"], int]
"""Which axis of a tensor runs over heads, queries or keys."""


class Bias(Description, ABC):
    """What is added to the scores of one call of attention."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""

    @abstractmethod
    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""

    def dense(self) -> Float[Tensor, "#batch #head query key"]:
        """The whole matrix, slow and large on purpose: the definition, for tests and pictures."""
        return self.tile(ALL, ALL)

    def positions(self) -> tuple[Tensor, Tensor] | None:
        """The positions of queries and keys that it was made for, if it holds them."""
        return None

    @property
    def is_compact(self) -> bool:
        """Whether a file can hold it in less room than its matrix."""
        return True

    @property
    def is_uniform(self) -> bool:
        """Whether it is seen to depend on distance alone; False where it does not, or that is hard to see."""
        return False

    def axes(self) -> dict[str, Axes]:
        """By the name of a tensor which of its axes runs over heads, queries or keys; one of 1 is for all of them.

        With these a bias of some queries and keys is put together from those of others.
        """
        return dict(self._axes)

    def key_peaks(self, width: int, count: int) -> dict[str, Tensor] | None:
        """What bounds the bias of `count` blocks of `width` keys from above, by name; None where nothing does.

        The last axis of each runs over the blocks; those behind the last key are bounded by -inf.
        """
        return None

    def ceiling(self, peaks: Mapping[str, Tensor]) -> Float[Tensor, "#batch #head query block"]:
        """The largest bias that each query can have in blocks of keys with these peaks, if none comes after it."""
        raise NotImplementedError(f"a {type(self).__name__} has no bound")

    def first_sequence(self: B) -> B:
        """That of the first sequence alone, detached and on the CPU: for maps and files."""
        own = {name: x.detach()[:1] if name in self._by_sequence else x.detach() for name, x in self.tensors().items()}
        return self.rebuilt({name: x.cpu() for name, x in own.items()})

    _by_sequence: ClassVar[tuple[str, ...]] = ()
    """The tensors whose first axis is the batch."""
    _axes: ClassVar[Mapping[str, Axes]] = {}
    """`axes` of a kind whose tensors always have the same."""


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
    """table[:, index], with a gradient that is always summed in the same order, which indexing does not promise."""
    return table.gather(1, index.reshape(1, -1).expand(table.shape[0], -1)).view(table.shape[0], *index.shape)


Side = Literal["query", "key"]
"""Whose vectors meet the profiles."""

Beyond = Literal["clamp", "zero"]
"""What a distance outside of a table has: its end, or nothing."""

FEW_ROWS = 4
"""Up to so many queries meet a column of the profiles each, instead of all keys all columns: as in decoding."""


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
    batch, heads = max(values.shape[0], index.shape[0]), values.shape[1]
    return values.expand(batch, -1, -1, -1).gather(3, index[:, None].expand(batch, heads, -1, -1))


Curve = Literal["linear", "log1p_square"]
"""What becomes of a difference of levels: itself, or log(1 + difference ** 2)."""


@described
@dataclass(frozen=True, eq=False)
class LevelBias(Bias):
    """bias[b, h, i, j] = -slope[b, h, i] * curve(abs(query_level[b, h, i] - key_level[b, h, j])).

    Levels are float64 and their difference is taken before rounding, so that precision does not depend on how far a
    level has climbed. Where a device has no float64 a level is the sum of two float32, itself and its rest.
    Where levels are running sums of steps (`of_steps`) and no gradient is wanted, they are not summed until they are
    asked for: a decoder has the steps of thousands of tokens and needs each sum for one query.
    """

    query_level: Float[Tensor, "#batch #head query"] | None
    key_level: Float[Tensor, "#batch #head key"] | None
    slope: Float[Tensor, "#batch #head #query"]
    curve: Curve = "linear"
    rising: bool = False
    """Whether no key's level is above that of a later key or query. Verified where it can be, never trusted."""
    query_rest: Float[Tensor, "#batch #head query"] | None = None
    key_rest: Float[Tensor, "#batch #head key"] | None = None
    step: Float[Tensor, "#batch #head key"] | None = None
    start: int = 0
    """The slot of the first query among the steps."""
    queries: int = 0
    """How many queries there are where levels are steps."""

    _by_sequence: ClassVar = ("query_level", "key_level", "slope", "query_rest", "key_rest", "step")
    _axes: ClassVar = {
        **{name: {"head": 1, "query": 2} for name in ("query_level", "query_rest", "slope")},
        **{name: {"head": 1, "key": 2} for name in ("key_level", "key_rest")},
    }

    def __post_init__(self) -> None:
        check_choice("curve", self.curve, get_args(Curve))
        if self.step is None:
            for name in ("query_level", "key_level"):
                self._check_level(name)
        else:
            check_tensor("step", self.step, ("batch or 1", "head or 1", "key"), "floating-point")
        parts = (self.query_level, self.key_level, self.step, self.slope)
        check_tensor("slope", self.slope, ("batch or 1", "head or 1", "query or 1"), "floating-point")
        for axis, what in ((0, "batch"), (1, "heads")):
            check_broadcast("levels and slope", [part.shape[axis] for part in parts if part is not None], what)
        if self.slope.shape[2] not in (1, self.shape[2]):
            raise ValueError(f"slope must have one number per query, {self.shape[2]}, or 1, got {self.slope.shape[2]}")

    def _check_level(self, name: str) -> None:
        level, rest = getattr(self, name), getattr(self, name.replace("level", "rest"))
        check_tensor(name, level, ("batch or 1", "head or 1", "position"), "floating-point")
        wanted = torch.float64 if rest is None else torch.float32
        if level.dtype != wanted:
            raise TypeError(f"{name} must be {wanted}, or torch.float32 with a rest beside it, got {level.dtype}")

    @classmethod
    def of_steps(
        cls,
        step: Float[Tensor, "batch head key"],
        slope: Float[Tensor, "#batch #head #query"],
        *,
        start: int | Int[Tensor, ""],
        queries: int,
        curve: Curve = "linear",
        rising: bool = False,
        ring: Ring | None = None,
    ) -> "LevelBias":
        """Levels that are running sums of steps; those of the queries are the ones from slot `start` on."""
        lazy = isinstance(start, int) and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if lazy and ring is None and has_float64(step.device):
            return cls(None, None, slope, curve, rising, step=step, start=int(start), queries=queries)
        parts: list[Tensor | None] = []
        for level in running_sums(step, ring):
            parts += [None, None] if level is None else [_from_slot(level, start, queries), level]
        query_level, key_level, query_rest, key_rest = parts
        return cls(query_level, key_level, slope, curve, rising, query_rest, key_rest)

    def summed(self) -> "LevelBias":
        """The same bias with levels, where it has steps."""
        if self.step is None:
            return self
        key_level = float64_sums(self.step)
        query_level = _from_slot(key_level, self.start, self.queries)
        return LevelBias(query_level, key_level, self.slope, self.curve, self.rising)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        if self.step is not None:
            parts, queries, keys = [self.step, self.slope], self.queries, self.step.shape[2]
        else:
            assert self.query_level is not None
            assert self.key_level is not None
            parts = [self.query_level, self.key_level, self.slope]
            queries, keys = self.query_level.shape[2], self.key_level.shape[2]
        batch, heads = (max(part.shape[axis] for part in parts) for axis in (0, 1))
        return batch, heads, queries, keys

    def difference(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """query_level - key_level of some pairs, in the levels' own precision."""
        if self.step is not None:
            return self.summed().difference(rows, columns)
        assert self.query_level is not None
        assert self.key_level is not None
        whole = self.query_level[..., rows, None] - self.key_level[..., None, columns]
        if self.query_rest is None or self.key_rest is None:
            return whole
        return whole + (self.query_rest[..., rows, None] - self.key_rest[..., None, columns])

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in the slope's precision, float32 at least."""
        slope = at_least_float32(self.slope).expand(-1, -1, self.shape[2])[..., rows, None]
        difference = self.difference(rows, columns).to(slope.dtype)
        return -slope * (difference.abs() if self.curve == "linear" else torch.log1p(difference.square()))

    @property
    def is_uniform(self) -> bool:
        """Whether levels stand in even steps and slopes do not change."""
        levels = self.summed()
        if levels.query_level is None or levels.key_level is None or levels.query_rest is not None:
            return False
        steps = torch.cat([levels.query_level.diff(), levels.key_level.diff()], -1)
        return bool((steps == steps[..., :1]).all() and (self.slope == self.slope[..., :1]).all())

    def key_peaks(self, width: int, count: int) -> dict[str, Tensor] | None:
        """The highest level of each block, where a level is one number."""
        if self.key_level is None or self.key_rest is not None:
            return None
        return {"level": block_peaks(self.key_level, width, count)}

    def ceiling(self, peaks: Mapping[str, Tensor]) -> Float[Tensor, "#batch #head query block"]:
        """From the highest level; no bound where a slope is negative."""
        assert self.query_level is not None
        slope = at_least_float32(self.slope.detach())[..., None]
        way = (self.query_level.detach()[..., None] - peaks["level"][..., None, :]).clamp(min=0).to(slope.dtype)
        fall = way if self.curve == "linear" else torch.log1p(way.square())
        return torch.where(slope >= 0, -slope * fall, torch.inf)

    def first_sequence(self) -> "LevelBias":
        """With levels where it has steps."""
        return super(LevelBias, self.summed()).first_sequence()

    @property
    def falls(self) -> bool:
        """Whether `rising` is declared and not true; reads the levels."""
        levels = self.summed()
        if not self.rising or levels.key_level is None or levels.query_level is None or levels.key_rest is not None:
            return False
        return bool((levels.key_level.diff() < 0).any() | (levels.query_level.diff() < 0).any())


def _from_slot(level: Tensor, start: int | Tensor, count: int) -> Tensor:
    """Those of `count` slots from `start` on."""
    if isinstance(start, Tensor):
        return level.index_select(2, start + torch.arange(count, device=start.device))
    return level if count == level.shape[2] else level[..., start : start + count]


def has_float64(device: torch.device) -> bool:
    """Whether a device can add in float64; Apple's cannot."""
    return device.type != "mps"


def running_sums(step: Float[Tensor, "*rest key"], ring: Ring | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums of the steps up to each, in float64 or, without it, as float32 and what that rounded away.

    `ring` is the layout's: where several processes share a sequence, the sums are over the tokens of all of them.
    """
    if ring is not None:
        return ring.running_sums(step), None
    if has_float64(step.device):
        return float64_sums(step), None
    return two_float_sums(step)


def float64_sums(step: Float[Tensor, "*rest key"]) -> Float[Tensor, "*rest key"]:
    """Running sums in float64; on a device by doubling, since cumsum's bits differ there from run to run."""
    return step.cumsum(-1, dtype=torch.float64) if step.device.type == "cpu" else doubled_sums(step.double())


def doubled_sums(step: Float[Tensor, "*rest key"]) -> Float[Tensor, "*rest key"]:
    """Running sums in log(n) additions, always in the same order, and so are those of its gradient."""
    reach = 1
    while reach < step.shape[-1]:
        step = step + torch.nn.functional.pad(step, (reach, 0))[..., : step.shape[-1]]
        reach *= 2
    return step


LEAST_FALL = 87.0
"""From so much on, in nats, float32 has no whole precision left for a weight."""


def block_peaks(x: Tensor, width: int, count: int) -> Tensor:
    """The largest of each of `count` blocks along the last axis; where there is nothing, the least there can be."""
    least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min // 2
    filled = torch.nn.functional.pad(x.detach(), (0, width * count - x.shape[-1]), value=least)
    return filled.unflatten(-1, (count, width)).amax(-1)


def two_float_sums(step: Float[Tensor, "*rest key"]) -> tuple[Tensor, Tensor]:
    """Running sums as two float32, by doubling: log(n) additions, each with what it rounds away kept beside it."""
    high, low = step.float(), torch.zeros_like(step, dtype=torch.float32)
    reach = 1
    while reach < step.shape[-1]:
        before_high = torch.nn.functional.pad(high, (reach, 0))[..., : step.shape[-1]]
        before_low = torch.nn.functional.pad(low, (reach, 0))[..., : step.shape[-1]]
        total = high + before_high
        other = total - high
        error = (high - (total - other)) + (before_high - other)
        rest = error + low + before_low
        high = total + rest
        low = rest - (high - total)
        reach *= 2
    return high, low


def two_floats(level: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """A float64 number as two float32, itself and its rest, for kernels that stay in float32."""
    high = level.float()
    return high, (level - high.to(level.dtype)).float()


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


@described
@dataclass(frozen=True, eq=False)
class FunctionBias(Bias):
    """bias[b, h, i, j] = function(rows, columns, *arguments), asked for tile by tile and never whole.

    `function` is pure and lives at the top of a module. Everything that may need a gradient is in `arguments`, never
    captured. The last axis of arguments[0] runs over the queries, that of arguments[1] over the keys; `sides` says of
    which others it does, a letter each: "qkq" where arguments[2] has one number per query. Decorated with `registered`
    it also works at full speed under torch.compile.
    """

    function: Callable[..., Float[Tensor, "#batch #head row column"]]
    arguments: tuple[Tensor, ...]
    sides: str = "qk"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be a function of rows and columns, got {describe(self.function)}")
        if len(self.arguments) < 2:
            raise ValueError(
                "a FunctionBias needs arguments[0] with queries and arguments[1] with keys along the last axis, got "
                f"{len(self.arguments)} arguments"
            )
        if not self.sides.startswith("qk") or set(self.sides) != {"q", "k"} or len(self.sides) > len(self.arguments):
            raise ValueError(
                "sides must have 'q' or 'k' for each argument that has queries or keys along its last axis, and begin "
                f"with 'qk', got {self.sides!r}"
            )

    def axes(self) -> dict[str, Axes]:
        """Heads may be anywhere."""
        side: dict[str, Literal["query", "key"]] = {"q": "query", "k": "key"}
        return {f"arguments.{i}": {side[letter]: self.arguments[i].ndim - 1} for i, letter in enumerate(self.sides)}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        batch, heads = self.tile(slice(0, 1), slice(0, 1)).shape[:2]
        return batch, heads, self.arguments[0].shape[-1], self.arguments[1].shape[-1]

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix."""
        return self.function(rows, columns, *self.arguments)

    @property
    def is_compact(self) -> bool:
        """Whether the function has a name that a file can hold."""
        return bool(registered_name(self.function))

    def first_sequence(self) -> "FunctionBias":
        """Arguments with as many rows as there are sequences have that of the first; a function may have others."""
        batch = self.shape[0]
        return self.rebuilt(
            {
                name: (x.detach()[:1] if batch > 1 and x.ndim > 1 and x.shape[0] == batch else x.detach()).cpu()
                for name, x in self.tensors().items()
            }
        )


@described
@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """bias[b, h, i, j] = value[b, h, i, j]: the last resort, quadratic."""

    value: Float[Tensor, "#batch #head query key"]

    _by_sequence: ClassVar = ("value",)
    _axes: ClassVar = {"value": {"head": 1, "query": 2, "key": 3}}

    @property
    def is_compact(self) -> bool:
        """It is its matrix."""
        return False

    def __post_init__(self) -> None:
        check_tensor("value", self.value, ("batch or 1", "head or 1", "query", "key"), "floating-point")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        batch, heads, queries, keys = self.value.shape
        return batch, heads, queries, keys

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""
        return at_least_float32(self.value[:, :, rows][..., columns])


@described
@dataclass(frozen=True, eq=False)
class SumBias(Bias):
    """bias[b, h, i, j] = the sum of that of all terms."""

    terms: tuple[Bias, ...]

    def __post_init__(self) -> None:
        if not self.terms or not all(isinstance(term, Bias) for term in self.terms):
            raise TypeError("a SumBias must have one Bias or more as terms")
        shapes = [term.shape for term in self.terms]
        for axis, what in enumerate(("batch", "heads")):
            check_broadcast("the terms of a SumBias", [shape[axis] for shape in shapes], what)
        if any(shape[2:] != shapes[0][2:] for shape in shapes):
            raise ValueError(f"the terms of a SumBias must have the same queries and keys, got {shapes}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""
        shapes = [term.shape for term in self.terms]
        return max(s[0] for s in shapes), max(s[1] for s in shapes), *shapes[0][2:]

    def axes(self) -> dict[str, Axes]:
        """Those of all terms."""
        return {f"terms.{i}.{name}": own for i, term in enumerate(self.terms) for name, own in term.axes().items()}

    def key_peaks(self, width: int, count: int) -> dict[str, Tensor] | None:
        """Those of all terms, if each has some."""
        every = [term.key_peaks(width, count) for term in self.terms]
        if any(own is None for own in every):
            return None
        return {f"{i}.{name}": x for i, own in enumerate(every) for name, x in (own or {}).items()}

    def ceiling(self, peaks: Mapping[str, Tensor]) -> Float[Tensor, "#batch #head query block"]:
        """The sum of the terms' bounds."""
        bounds = []
        for i, term in enumerate(self.terms):
            own = {name.partition(".")[2]: x for name, x in peaks.items() if name.startswith(f"{i}.")}
            bounds.append(term.ceiling(own))
        return functools.reduce(torch.add, bounds)

    def positions(self) -> tuple[Tensor, Tensor] | None:
        """Those of the first term that has some."""
        return next((own for term in self.terms if (own := term.positions()) is not None), None)

    @property
    def is_compact(self) -> bool:
        """Whether all terms are."""
        return all(term.is_compact for term in self.terms)

    @property
    def is_uniform(self) -> bool:
        """Whether all terms are."""
        return all(term.is_uniform for term in self.terms)

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """The sum of the terms' tiles."""
        total = self.terms[0].tile(rows, columns)
        for term in self.terms[1:]:
            total = total + term.tile(rows, columns)
        return total

    def first_sequence(self) -> "SumBias":
        """The sum of the terms' own."""
        return type(self)(tuple(term.first_sequence() for term in self.terms))
