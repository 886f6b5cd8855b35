"""The positional part of every head, as numbers: `inspect` computes it, figures and pages draw it, files keep it.

A map is held as what it is made of. Where it has structure that is a `Bias`, small at any length; where it has none it
is pooled by tiles, and only `values` fills in a matrix, on request.

A file of maps is one of safetensors: numbers as tensors, everything else as JSON in its header. Nothing is pickled, and
a function is stored by name and looked up among the registered ones: a file cannot run code.

These are the data. `lengthwise.views.PositionMaps` is the same with its figures, its page and its file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lengthwise.bias import Bias, rebuild
from lengthwise.files import replacing
from lengthwise.views.described_scores import ContentScores, NetworkBias
from lengthwise.views.tiles import Tiles, order, tiles_of

Quantity = Literal["bias", "content", "scores", "weights", "profile"]
QUANTITIES: tuple[Quantity, ...] = ("bias", "content", "scores", "weights", "profile")
"""What there is to see: the additive term, the scores without it, with it, after the softmax; and by distance alone."""
STORED = (ContentScores, NetworkBias)
"""Kinds that a file can hold beside those of `lengthwise.bias`: importing them makes them known by name."""
FORM = "lengthwise position maps 3"
"""The first entry of the header; a change of the format changes the number."""


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
    """One layer: `described`, where causality alone hides keys, or `tiles` or, for quantity="profile", neither."""

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

    @property
    def asymmetry(self) -> Float[Tensor, " head"]:
        """How far each head tells left from right; NaN under causality, and where queries are not the keys.

        The odd part of its mean by distance as a share of how far that varies, over all pairs: 0 where both sides are
        alike, 1 where one is the other turned over.
        """
        mean = self.profile.mean.double()
        if self.causal or self.queries != self.keys or mean.shape[1] != 2 * self.keys - 1:
            return torch.full((self.heads,), torch.nan)
        pairs = (self.keys - self.profile.distances.abs()).double() * mean.isfinite() * mean.flip(1).isfinite()
        mean = mean.nan_to_num()
        centre = (pairs * mean).sum(1, keepdim=True) / pairs.sum(1, keepdim=True)
        odd, whole = (mean - mean.flip(1)) / 2, mean - centre
        varies = (pairs * whole.square()).sum(1)
        return ((pairs * odd.square()).sum(1) / varies).where(varies > 0, 0).sqrt().float()

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
    origin: Mapping[str, str | int | float] = field(default_factory=dict)
    """How the model was trained, where the maps outlive it: see `lengthwise.show.trained_maps`."""

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
    def asymmetry(self) -> Float[Tensor, "layer head"]:
        """How far heads tell left from right; NaN under causality."""
        return torch.stack([layer_map.asymmetry for layer_map in self.maps])

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


def save_maps(maps: LayerMaps, path: str | Path) -> Path:
    """Write the file whole or not at all."""
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    layers = [_pack(layer_map, f"{index}.", tensors) for index, layer_map in enumerate(maps.maps)]
    about = {
        name: getattr(maps, name) for name in ("model", "encoding", "quantity", "part", "sequences", "shown", "tokens")
    }
    with replacing(path) as partial:
        save_file(
            {name: _copy(tensor) for name, tensor in tensors.items()},
            partial,
            {"form": FORM, "about": json.dumps(about), "layers": json.dumps(layers), "origin": json.dumps(maps.origin)},
        )
    return path


def read_maps(path: str | Path) -> dict[str, Any]:
    """The fields of the maps that `save_maps` wrote."""
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(f"expected a file of position maps, got {path}, which cannot be read: {error}") from None
    if header.get("form") != FORM:
        raise ValueError(f"expected a file of position maps, got {path}, whose header is of something else")
    about = json.loads(header["about"])
    about["tokens"] = None if about["tokens"] is None else tuple(about["tokens"])
    layers = [_unpack(stored, f"{index}.", tensors) for index, stored in enumerate(json.loads(header["layers"]))]
    return {**about, "maps": tuple(layers), "origin": json.loads(header.get("origin", "{}"))}


def _pack(layer_map: LayerMap, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One layer: its tensors under a prefix, the rest returned."""
    parts = {
        "profile.mean": layer_map.profile.mean,
        "profile.spread": layer_map.profile.spread,
        "context": layer_map.context_dependence,
        "diagonal": layer_map.diagonal_spread,
    }
    if layer_map.kernel is not None:
        parts["kernel"] = layer_map.kernel
    if layer_map.tiles is not None:
        names = ("mean",) if layer_map.tiles.exact else ("mean", "least", "greatest")
        parts |= {f"tiles.{name}": getattr(layer_map.tiles, name) for name in names}
    bias = None
    if layer_map.described is not None:
        parts |= {f"bias.{name}": tensor for name, tensor in layer_map.described.tensors().items()}
        bias = {"kind": type(layer_map.described).__name__, "static": layer_map.described.static()}
    tensors |= {prefix + name: tensor for name, tensor in parts.items()}
    return {
        "layer": layer_map.layer,
        "queries": layer_map.queries,
        "keys": layer_map.keys,
        "causal": layer_map.causal,
        "first": layer_map.profile.first,
        "pool": layer_map.tiles and layer_map.tiles.pool,
        "bias": bias,
    }


def _unpack(stored: dict[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> LayerMap:
    parts = _under(prefix, tensors)
    described = None
    if stored["bias"] is not None:
        described = rebuild(stored["bias"]["kind"], _under("bias.", parts), stored["bias"]["static"])
    tiles = None
    if stored["pool"] is not None:
        mean = parts["tiles.mean"]
        tiles = Tiles(stored["pool"], mean, parts.get("tiles.least", mean), parts.get("tiles.greatest", mean))
    return LayerMap(
        layer=stored["layer"],
        queries=stored["queries"],
        keys=stored["keys"],
        causal=stored["causal"],
        described=described,
        tiles=tiles,
        profile=Profile(stored["first"], parts["profile.mean"], parts["profile.spread"]),
        context_dependence=parts["context"],
        diagonal_spread=parts["diagonal"],
        kernel=parts.get("kernel"),
    )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _copy(x: Tensor) -> Tensor:
    """A tensor with memory of its own: a file cannot tell apart tensors that share theirs."""
    return torch.clone(x.detach().cpu(), memory_format=torch.contiguous_format)
