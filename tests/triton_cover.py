"""Kinds of call, lengths, masks, shared keys and precisions for the Triton kernels; every two meet in some case.

pairwise()      few cases, in which every pair of choices occurs
products()      many
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from lengthwise.attention.triton.self_test import Kind
from lengthwise.attention.triton.tiles import FEW_ROWS

BIASES: dict[str, dict[str, object]] = {
    "none": {},
    "table": {"tables": 1},
    "table by position": {"tables": 1, "by_position": True},
    "levels": {"level": "linear"},
    "curved levels": {"level": "log1p_square"},
    "lines": {"lines": 16},
    "profiles": {"profile": "query clamp", "profiles": 16},
    "profiles of keys": {"profile": "key zero", "profiles": 16},
    "tables and levels": {"tables": 2, "level": "linear"},
    "all": {
        **{"tables": 1, "by_position": True, "level": "linear", "lines": 16},
        **{"profile": "query zero", "profiles": 16},
    },
}
AXES: dict[str, tuple[object, ...]] = {
    "bias": tuple(BIASES),
    "mask": ("", "two-sided", "window", "documents", "padding", "bands"),
    "length": (1, 63, 65, 131),
    "queries": ("all", "few"),
    "extras": ("", "sink", "logit scale", "softcap", "shared keys"),
    "dtype": ("float32", "bfloat16", "float16"),
    "width": (16, 32, 13),
}


class Choice(NamedTuple):
    """One case: a value of every axis."""

    bias: str
    mask: str
    length: int
    queries: str
    extras: str
    dtype: str
    width: int

    @property
    def kind(self) -> Kind:
        """The kind of its call."""
        power = 16 if self.width == 13 else self.width
        plain: dict[str, object] = {"tables": 0, "by_position": False, "level": "", "lines": 0}
        return Kind(
            **(plain | {"profile": "", "profiles": 0} | BIASES[self.bias]),  # type: ignore[arg-type]
            dtype=self.dtype,
            width=power,
            value=power,
            is_narrower=self.width != power,
            decoding="" if self.count > FEW_ROWS else "shares" if self.length > 63 else "whole",
            options=", ".join(filter(None, (self.mask, self.extras))),
            is_learned=True,
        )

    @property
    def count(self) -> int:
        """How many queries it has."""
        return self.length if self.queries == "all" else min(3, self.length)


def products() -> Iterator[Choice]:
    """Every bias with every mask, length and precision, with shared keys and without; the rest takes turns."""
    named = ("bias", "mask", "length", "dtype")
    for n, (bias, mask, length, dtype, shared) in enumerate(product(*(AXES[name] for name in named), (False, True))):
        extras = "shared keys" if shared else AXES["extras"][n % 4]
        queries, width = AXES["queries"][n % 5 == 0], AXES["width"][n % 3]
        yield Choice(bias, mask, length, queries, extras, dtype, width)  # type: ignore[arg-type]


def pairwise() -> list[Choice]:
    """Cases in which every two values of two axes occur together; always the same."""
    axes = list(AXES.values())
    open_pairs = {
        (a, x, b, y)
        for a, b in combinations(range(len(axes)), 2)
        for x in range(len(axes[a]))
        for y in range(len(axes[b]))
    }
    cases: list[Choice] = []
    while open_pairs:
        # The first pair that is open, filled up axis by axis with what closes most.
        a, x, b, y = min(open_pairs)
        chosen = {a: x, b: y}
        for axis in range(len(axes)):
            if axis not in chosen:
                chosen[axis] = max(
                    range(len(axes[axis])),
                    key=lambda value: _closed(open_pairs, chosen | {axis: value}),
                )
        open_pairs -= set(_pairs(chosen))
        cases.append(Choice(*(axes[axis][chosen[axis]] for axis in range(len(axes)))))  # type: ignore[arg-type]
    return cases


def _pairs(chosen: dict[int, int]) -> Iterator[tuple[int, int, int, int]]:
    for a, b in combinations(sorted(chosen), 2):
        yield a, chosen[a], b, chosen[b]


def _closed(open_pairs: set[tuple[int, int, int, int]], chosen: dict[int, int]) -> int:
    return sum(pair in open_pairs for pair in _pairs(chosen))
