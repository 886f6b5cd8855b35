"""Ways to stretch, as bands: where distances stay as they are, and by which positions tokens turn beyond.

With d = query - key, both counted in real tokens of the own document; L is the trained length.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.errors import OptionError, check_int
from lengthwise.token_layout import Band

Index = Int[Tensor, "#batch _"]
"""Tokens by their number in their own document."""


@dataclass(frozen=True)
class Turning:
    """By which positions queries and keys turn where they meet in a band: number / divisor; None is position 0."""

    band: Band
    query: Index
    key: Index | None
    divisor: int = 1


@dataclass(frozen=True)
class Method(ABC):
    """Bands, from the numbers behind a method's name and the trained length."""

    usage: ClassVar[str]
    """How it is written."""
    drops_keys: ClassVar[bool] = False
    """Whether some keys are not seen at all."""
    train_length: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "train_length":
                check_int(f"{field.name} of {self.usage!r}", value)
        if self.near is not None and self.near > self.train_length:
            raise OptionError(
                f"{self.usage!r} must leave distances below the trained length, {self.train_length:,}, as they are, "
                f"got {self.near:,}"
            )

    @property
    @abstractmethod
    def near(self) -> int | None:
        """Up to where distances stay as they are, if that must be below the trained length."""

    @abstractmethod
    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """The bands, which share no pair."""

    def bands(self) -> tuple[Band, ...]:
        """The bands alone."""
        one = torch.zeros(1, 1, dtype=torch.long)
        return tuple(turning.band for turning in self.turnings(one, one))


@dataclass(frozen=True)
class PlainWindow(Method):
    """The nearest keys alone: what every other method must beat where far text matters."""

    usage: ClassVar[str] = "window[:W]"
    drops_keys: ClassVar[bool] = True
    window: int | None = None

    @property
    def near(self) -> None:
        """A window beyond the trained length is a question that can be asked."""
        return None

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """One band."""
        return [Turning(Band(0, self.window or self.train_length), query, key)]


@dataclass(frozen=True)
class ReRope(Method):
    """min(d, W)."""

    usage: ClassVar[str] = "rerope:W"
    window: int

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Far keys do not turn, and their queries turn as at W."""
        return [_near(self.window, query, key), Turning(Band(self.window), constant(self.window, query), None)]


@dataclass(frozen=True)
class LeakyReRope(Method):
    """d, beyond W it is W + (d - W) / K."""

    usage: ClassVar[str] = "leaky-rerope:W:K"
    window: int
    factor: int

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """W + (i - j - W) / K = ((i + (K - 1) W) - j) / K: whole numbers over K."""
        shifted = query + (self.factor - 1) * self.window
        return [_near(self.window, query, key), Turning(Band(self.window), shifted, key, self.factor)]


@dataclass(frozen=True)
class SelfExtend(Method):
    """d, beyond W it is i // G - j // G + W - W // G."""

    usage: ClassVar[str] = "self-extend:G[:W]"
    group: int
    window: int | None = None

    @property
    def near(self) -> int:
        """W, as in the paper a quarter of the trained length."""
        return self.window or max(1, self.train_length // 4)

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Far positions are those of groups, moved so that they go on where near ones end."""
        grouped, shift = _floor(query, self.group), self.near - self.near // self.group
        return [_near(self.near, query, key), Turning(Band(self.near), grouped + shift, _floor(key, self.group))]


@dataclass(frozen=True)
class DualChunk(Method):
    """Keys stand at j mod C. In the same chunk queries stand at i mod C, in the next at min(i mod C + C, S), then at
    min(2 C - 1, S)."""

    usage: ClassVar[str] = "dca[:C[:S]]"
    chunk: int | None = None
    furthest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # A query of the next chunk stands at S at most, and the last key of its chunk at C - 1.
        if self.limit < self.near:
            default = "" if self.furthest else ", which is 3/4 of the trained length by default"
            raise OptionError(
                f"S of {self.usage!r} must be at least C, or some distances would be negative, got C = {self.near:,} "
                f"and S = {self.limit:,}{default}"
            )

    @property
    def limit(self) -> int:
        """S, as in the published code three quarters of the trained length."""
        return self.furthest or max(1, 3 * self.train_length // 4)

    @property
    def near(self) -> int:
        """C, as in the published code a sixteenth of the trained length below S."""
        return self.chunk or max(1, self.limit - self.train_length // 16)

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Within a chunk, to the chunk before it, and to all others."""
        chunk, placed, keys = self.near, query.remainder(self.near), key.remainder(self.near)
        return [
            Turning(Band(0, 1, chunk=chunk), placed, keys),
            Turning(Band(1, 2, chunk=chunk), (placed + chunk).clamp(max=self.limit), keys),
            Turning(Band(2, chunk=chunk), constant(min(2 * chunk - 1, self.limit), query), keys),
        ]


@dataclass(frozen=True)
class LmInfinite(Method):
    """The nearest W keys, and the first N of the text, whose distance is at most W."""

    usage: ClassVar[str] = "lm-infinite:W[:N]"
    drops_keys: ClassVar[bool] = True
    window: int
    first: int = 10

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """The first keys, once they are far, are all at distance W."""
        far = Band(self.window, first=self.first)
        return [_near(self.window, query, key), Turning(far, constant(self.window, query), None)]


@dataclass(frozen=True)
class Streaming(Method):
    """The nearest W keys, and the first N of the text; positions are counted in the keys that are left."""

    usage: ClassVar[str] = "streaming:W[:N]"
    drops_keys: ClassVar[bool] = True
    window: int
    first: int = 4

    @property
    def near(self) -> int:
        """W and N: so many positions are used."""
        return self.window + self.first

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Among N + W keys a query is the last, and the first ones stand where they always stood."""
        far = Band(self.window, first=self.first)
        return [_near(self.window, query, key), Turning(far, query.clamp(max=self.near - 1), key)]


METHODS: dict[str, type[Method]] = {
    method.usage.partition(":")[0].partition("[")[0]: method
    for method in (ReRope, LeakyReRope, SelfExtend, DualChunk, LmInfinite, Streaming, PlainWindow)
}
"""Methods of bands by name."""

CONTROL = "window"
"""The method that uses no far text."""


def _near(window: int, query: Index, key: Index) -> Turning:
    return Turning(Band(0, window), query, key)


def constant(position: int, like: Index) -> Index:
    """One position for all."""
    return like.new_full((1, 1), position)


def _floor(number: Index, divisor: int) -> Index:
    return number.div(divisor, rounding_mode="floor")
