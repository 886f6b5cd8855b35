"""Biases of any structure: a function of rows and columns, the matrix itself, and the sum of others."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias.base import Axes, Bias, Index
from lengthwise.bias.description import described, registered_name
from lengthwise.bias.precision import at_least_float32
from lengthwise.errors import check_broadcast, check_tensor, describe


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


def flat_terms(bias: Bias | None) -> list[Bias]:
    """The terms that a bias is the sum of, none of them a sum itself."""
    if isinstance(bias, SumBias):
        return [own for term in bias.terms for own in flat_terms(term)]
    return [] if bias is None else [bias]
