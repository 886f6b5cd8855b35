"""What the page is told: described forms as they are described, everything else as tiles, as plain JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.maps import LayerMap, PositionMaps, What
from lengthwise.views.page.numbers import packed
from lengthwise.views.tiles import Tiles

KINDS = ("DistanceBias", "LevelBias", "LineBias", "FunctionBias", "SumBias")
FUNCTIONS = (
    "lengthwise.encodings.fire.fire_tile",
    "lengthwise.encodings.kerple.kerple_log",
    "lengthwise.encodings.kerple.kerple_power",
)
"""Kinds and functions that matrix.js has too; anything else is sent as tiles."""

TILE, BOUND, CELL, LEVEL = 10, 7, 15, 32
"""Bits kept after the first: a tile's mean, its bounds (rounded outwards), a single cell, and a level of float64."""

SIDE = 256
"""Tiles along a side for a function that the page does not know."""

Detail = Mapping[tuple[int, int], Tensor]
"""Every number of single heads, by layer and head: (query, key) each."""


def view(maps: PositionMaps, detail: Detail | None = None) -> list[dict[str, Any]]:
    """All layers of one view."""
    return [
        _layer(one, {head: x for (layer, head), x in (detail or {}).items() if layer == one.layer}) for one in maps.maps
    ]


def _layer(one: LayerMap, detail: Mapping[int, Tensor]) -> dict[str, Any]:
    described = None if one.described is None else _bias(one.described)
    tiles = one.tiles if one.described is None else None if described else one.pooled(SIDE)
    uniform = described is not None and not bool(one.diagonal_spread.any()) and not bool(one.context_dependence.any())
    return {
        "layer": one.layer,
        "heads": one.heads,
        "queries": one.queries,
        "keys": one.keys,
        "causal": one.causal,
        "context": [None if bool(x.isnan()) else float(x) for x in one.context_dependence],
        "diagonal": [float(x) for x in one.diagonal_spread],
        "matrix": described or (None if tiles is None else _tiles(tiles)),
        # Where only distance matters the last row says it all, and the page reads it there.
        "profile": None
        if uniform and one.causal
        else {
            "first": one.profile.first,
            "mean": packed(_array(one.profile.mean), bits=TILE),
            "spread": packed(_array(one.profile.spread), bits=BOUND),
        },
        "kernel": None if one.kernel is None else packed(_array(one.kernel), bits=TILE),
        "detail": {str(head): packed(_array(x), bits=CELL) for head, x in detail.items()},
    }


def _tiles(tiles: Tiles) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": "tiles", "pool": tiles.pool}
    said["mean"] = packed(_array(tiles.mean), bits=CELL if tiles.exact else TILE)
    if not tiles.exact:
        said["least"] = packed(_array(tiles.least), bits=BOUND, side="down")
        said["greatest"] = packed(_array(tiles.greatest), bits=BOUND, side="up")
    return said


def _bias(bias: Bias) -> dict[str, Any] | None:
    """A described form, or None where the page cannot fill it in."""
    static = bias.static()
    kinds = [type(bias).__name__, *(value for name, value in static.items() if name.endswith("kind"))]
    functions = [value for name, value in static.items() if name.rpartition(".")[2] == "function"]
    if any(kind not in KINDS for kind in kinds) or any(name not in FUNCTIONS for name in functions):
        return None
    sent: dict[str, Tensor] = {}
    tensors: dict[str, Any] = {}
    for name, x in bias.tensors().items():
        # Queries' levels are often those of the keys: a tensor that was sent already is sent as its name.
        twin = next((other for other, y in sent.items() if x.dtype == y.dtype and torch.equal(x, y)), None)
        tensors[name] = _tensor(name, x) if twin is None else twin
        sent[name] = x
    return {"kind": kinds[0], "static": static, "tensors": tensors, "heads": bias.shape[1]}


def _tensor(name: str, x: Tensor) -> dict[str, Any] | int:
    """Positions by where they begin, levels to some bits, tables by their differences, all else as it is."""
    field = name.rpartition(".")[2]
    if not x.is_floating_point():
        return _positions(x)
    if field in ("query_level", "key_level"):
        return packed(_array(x[0]), bits=LEVEL)
    return packed(_array(x if x.dtype == torch.float64 else x.float()), smooth=field == "table")


def _positions(x: Tensor) -> dict[str, Any] | int:
    """Positions of the first sequence: where they begin if they have no gaps, else all of them."""
    row = x[0]
    if row.numel() and bool((row.diff() == 1).all()):
        return int(row[0])
    return packed(_array(row.double()))


def _array(x: Tensor) -> np.ndarray:
    found: np.ndarray = x.detach().cpu().numpy()
    return found


def tokens_of(views: Mapping[What, PositionMaps]) -> list[str] | None:
    """The tokens, if any view has them."""
    found = next((maps.tokens for maps in views.values() if maps.tokens is not None), None)
    return None if found is None else list(found)
