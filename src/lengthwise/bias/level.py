"""Biases by level: every token has one, and a pair has a curve of the difference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.bias.base import Bias, Index, block_peaks
from lengthwise.bias.description import described
from lengthwise.bias.precision import at_least_float32, float64_sums, has_float64, running_sums
from lengthwise.errors import check_broadcast, check_choice, check_tensor
from lengthwise.token_layout import Ring

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
