"""The positional part of every head, as numbers: `inspect` computes it, figures and pages draw it, files keep it.

A map is held as what it is made of. Where it has structure that is a `Bias`, small at any length; where it has none it
is pooled by tiles, and only `values` fills in a matrix, on request.

These are the data. `PositionMaps` of position_maps.py is the same with its figures, its page and its file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.tiles import Tiles, order, tiles_of

Quantity = Literal["bias", "content", "scores", "weights", "profile"]
QUANTITIES: tuple[Quantity, ...] = ("bias", "content", "scores", "weights", "profile")
"""What there is to see: the additive term, the scores without it, with it, after the softmax; and by distance alone."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Mean and spread (standard deviation) by distance = query - key, over all pairs and sequences.

    Column c is distance `first` + c; NaN where every pair of that distance is masked.
    """

    first: int
    mean: Float[Tensor, "head distance"]
    spread: Float[Tensor, "head distance"]

    @property
    def distances(self) -> Tensor:
        """The distance of each column."""
        return torch.arange(self.first, self.first + self.mean.shape[1])


@dataclass(frozen=True, eq=False)
class LayerMap:
    """One layer: `described` or `tiles` or, for quantity="profile", neither."""

    layer: int
    queries: int
    keys: int
    causal: bool
    described: Bias | None
    tiles: Tiles | None
    profile: Profile
    context_dependence: Float[Tensor, " head"]
    """The spread over sequences at the same query and key, root mean square; NaN where there was one sequence only."""
    diagonal_spread: Float[Tensor, " head"]
    """The spread along diagonals within a sequence, root mean square: 0 where only the distance matters."""
    kernel: Float[Tensor, "head distance"] | None = None
    """For rotary encodings, quantity="profile": the score of the mean query and the mean key by distance."""

    @property
    def heads(self) -> int:
        """How many heads."""
        return len(self.diagonal_spread)

    def pooled(self, resolution: int = 512) -> Tiles:
        """The map as tiles, at most `resolution` along either side where it is described, else as it was stored."""
        if self.described is not None:
            return tiles_of(self.described, resolution, causal=self.causal)
        if self.tiles is None:
            raise ValueError("a map must be of bias, content, scores or weights, got a profile; draw it with curves()")
        return self.tiles

    @property
    def values(self) -> Float[Tensor, "head query key"]:
        """Every number, NaN where attention is masked; an error if only tiles were stored."""
        if self.described is None:
            tiles = self.pooled()
            if not tiles.exact:
                raise ValueError(
                    f"every number of a map of {self.queries} x {self.keys} needs tiles of 1 x 1, got tiles of "
                    f"{tiles.pool} x {tiles.pool}; pass resolution={max(self.queries, self.keys)} to position_maps"
                )
            return tiles.mean
        dense = self.described.dense()[0].float()
        if not self.causal:
            return dense
        every = slice(0, self.queries), slice(0, self.keys)
        return dense.masked_fill(~order(*every, self.queries, self.keys), torch.nan)


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The maps of some layers of one model."""

    model: str
    encoding: str
    quantity: Quantity
    maps: tuple[LayerMap, ...]
    part: str = ""
    """"encoder", "decoder" or "cross" in models that have several kinds of attention."""
    sequences: int = 1
    """How many the model read."""
    shown: Literal["first", "mean"] = "first"
    """Whether the map is that of the first sequence or the mean over all."""
    tokens: tuple[str, ...] | None = None
    """The tokens of the first sequence, as text."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return tuple(layer_map.layer for layer_map in self.maps)

    @property
    def heads(self) -> int:
        """How many heads a layer has."""
        return self.maps[0].heads

    def layer(self, number: int) -> LayerMap:
        """The map of one layer, by its number."""
        for layer_map in self.maps:
            if layer_map.layer == number:
                return layer_map
        raise ValueError(f"layer must be one of those that were computed, {list(self.layers)}, got {number}")

    def layer_label(self, number: int) -> str:
        """What a layer has where layers differ, such as "rope:512"; "" where all are alike."""
        listed = self.encoding.rpartition("; ")[2].split(",")
        return listed[number % len(listed)] if len(listed) > 1 else ""

    def only(self, layer: int | None = None) -> Self:
        """The same with one layer alone, the last if none is named."""
        return replace(self, maps=(self.maps[-1] if layer is None else self.layer(layer),))

    @cached_property
    def values(self) -> Tensor:
        """Every number: (head, query, key) for one layer, (layer, head, query, key) for several."""
        layers = [layer_map.values for layer_map in self.maps]
        return layers[0] if len(layers) == 1 else torch.stack(layers)

    @property
    def context_dependence(self) -> Float[Tensor, "layer head"]:
        """How far heads follow the tokens: the spread over sequences at the same query and key."""
        return torch.stack([layer_map.context_dependence for layer_map in self.maps])

    @property
    def diagonal_spread(self) -> Float[Tensor, "layer head"]:
        """How far maps are from uniform diagonals."""
        return torch.stack([layer_map.diagonal_spread for layer_map in self.maps])

    @property
    def title(self) -> str:
        """What it is, in a line."""
        where = f"{self.part} layer" if self.part else "layer"
        which = f"{where}{'s' * (len(self.maps) > 1)} {_spans(self.layers)}"
        own = self.layer_label(self.layers[0]) if len(self.maps) == 1 else ""
        return f"{own or self.encoding}: {self.quantity} of {self.model}, {which}"


def _spans(numbers: Iterable[int]) -> str:
    """Layers as people count them, runs joined.

    >>> _spans([0, 1, 2, 5])
    '1-3, 6'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0] + 1) if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}" for run in runs)
