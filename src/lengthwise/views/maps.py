"""The positional part of every head, as numbers: what `inspect` finds, pictures are drawn from, and files keep.

A map is held as what it is made of. Where there is structure that is a `Bias`, small at any length; where there is
none it is pooled by tiles, and only `values` fills in a matrix, when asked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.tiles import Tiles, order, tiles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lengthwise.views.page import Page

What = Literal["bias", "content", "scores", "weights", "profile"]
WHATS: tuple[What, ...] = ("bias", "content", "scores", "weights", "profile")
"""What there is to see: the additive term, the scores without it, with it, after the softmax; and by distance alone."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Mean and spread (standard deviation) by distance = query - key, over all pairs and sequences.

    Column c is distance `first` + c; NaN where no pair of that distance may meet.
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
    """One layer: `described` or `tiles` or, for what="profile", neither."""

    layer: int
    queries: int
    keys: int
    causal: bool
    described: Bias | None
    tiles: Tiles | None
    profile: Profile
    context_dependence: Float[Tensor, " head"]
    """The spread over sequences at the same query and key, root mean square; NaN where only one sequence was seen."""
    diagonal_spread: Float[Tensor, " head"]
    """The spread along diagonals within a sequence, root mean square: 0 where only the distance matters."""
    kernel: Float[Tensor, "head distance"] | None = None
    """For rotary encodings, what="profile": the score of the mean query and the mean key at each distance from 0."""

    @property
    def heads(self) -> int:
        """How many heads."""
        return len(self.diagonal_spread)

    def pooled(self, resolution: int = 512) -> Tiles:
        """The map as tiles, at most `resolution` along either side where it is described, else as it was kept."""
        if self.described is not None:
            return tiles_of(self.described, resolution, causal=self.causal)
        if self.tiles is None:
            raise ValueError(
                "a profile has no map to draw; what='profile' came. Draw it with curves(), or ask for another `what`."
            )
        return self.tiles

    @property
    def values(self) -> Float[Tensor, "head query key"]:
        """Every number, NaN where attention may not look; an error if only tiles were kept."""
        if self.described is None:
            tiles = self.pooled()
            if not tiles.exact:
                raise ValueError(
                    f"only tiles of {tiles.pool} x {tiles.pool} were kept of this map of {self.queries} x {self.keys}; "
                    f"every number was asked for. Give position_maps resolution={max(self.queries, self.keys)}."
                )
            return tiles.mean
        dense = self.described.dense()[0].float()
        if not self.causal:
            return dense
        every = slice(0, self.queries), slice(0, self.keys)
        return dense.masked_fill(~order(*every, self.queries, self.keys), torch.nan)


@dataclass(frozen=True, eq=False)
class PositionMaps:
    """The maps of some layers of one model. In a notebook it shows itself."""

    model: str
    encoding: str
    what: What
    maps: tuple[LayerMap, ...]
    part: str = ""
    """"encoder", "decoder" or "cross" in models that have several kinds of attention."""
    sequences: int = 1
    """How many were seen."""
    shown: Literal["first", "mean"] = "first"
    """Whether the map is that of the first sequence or the mean over all."""
    tokens: tuple[str, ...] | None = None
    """The tokens of the first sequence, as text."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return tuple(one.layer for one in self.maps)

    @property
    def heads(self) -> int:
        """How many heads a layer has."""
        return self.maps[0].heads

    def layer(self, number: int) -> LayerMap:
        """The map of one layer, by its number."""
        for one in self.maps:
            if one.layer == number:
                return one
        raise ValueError(
            f"layer {number} must be one of those that were looked at, {', '.join(map(str, self.layers))}. "
            "Ask position_maps for it."
        )

    def only(self, layer: int | None = None) -> "PositionMaps":
        """The same with one layer alone, the last if none is named."""
        return replace(self, maps=(self.maps[-1] if layer is None else self.layer(layer),))

    @cached_property
    def values(self) -> Tensor:
        """Every number: (head, query, key) for one layer, (layer, head, query, key) for several."""
        found = [one.values for one in self.maps]
        return found[0] if len(found) == 1 else torch.stack(found)

    @property
    def context_dependence(self) -> Float[Tensor, "layer head"]:
        """How far heads follow the tokens: the spread over sequences at the same query and key."""
        return torch.stack([one.context_dependence for one in self.maps])

    @property
    def diagonal_spread(self) -> Float[Tensor, "layer head"]:
        """How far maps are from uniform diagonals."""
        return torch.stack([one.diagonal_spread for one in self.maps])

    @property
    def title(self) -> str:
        """What it is, in a line."""
        where = f"{self.part} layer" if self.part else "layer"
        which = f"{where}{'s' * (len(self.maps) > 1)} {_spans(self.layers)}"
        return f"{self.encoding}: {self.what} of {self.model}, {which}"

    def figure(self, layer: int | None = None, *, heads: Sequence[int] | None = None, shared: bool = False) -> "Figure":
        """A panel per head of one layer, the last if none is named; `shared` gives all one range of colours."""
        from lengthwise.views.grid import grid

        return grid(self.only(layer), heads=heads, shared=shared)

    def overview(self) -> "Figure":
        """Every head of every layer in small: a row per layer, a column per head."""
        from lengthwise.views.grid import overview

        return overview(self)

    def curves(
        self,
        layer: int | None = None,
        *,
        heads: Sequence[int] | None = None,
        log: bool = False,
        spread: bool | None = None,
    ) -> "Figure":
        """Mean against distance, a line per head; `spread` shades it, by default where there is any."""
        from lengthwise.views.curves import curves

        return curves(self.only(layer), heads=heads, log=log, spread=spread)

    def page(self) -> "Page":
        """All of it as an interactive page: `.save("heads.html")` writes one file that needs no network."""
        from lengthwise.views.page import Page, Snapshot

        return Page([[Snapshot({self.what: self})]])

    def save(self, path: str | Path) -> Path:
        """One safetensors file, which `load_maps` reads; described forms stay described."""
        from lengthwise.views.storage import save_maps

        return save_maps(self, path)

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def _repr_png_(self) -> bytes:
        from lengthwise.views.canvas import png

        if self.what == "profile":
            return png(self.curves())
        return png(self.figure() if len(self.layers) == 1 else self.overview())


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
