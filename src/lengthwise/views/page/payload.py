"""What the page is told: described forms as they are described, everything else as tiles, as plain JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lengthwise.bias import TILES, Bias, DistanceBias, FunctionBias, LevelBias, LineBias, at_least_float32
from lengthwise.views.maps import LayerMap, PositionMaps, What
from lengthwise.views.page.numbers import packed
from lengthwise.views.tiles import Tiles

FUNCTIONS = {
    "lengthwise.encodings.fire.fire_tile": "fire",
    "lengthwise.encodings.k_cable.k_cable_tile": "k-cable",
    "lengthwise.encodings.kerple.kerple_log": "kerple-log",
    "lengthwise.encodings.kerple.kerple_power": "kerple-power",
}
"""Tile functions that matrix.js has too; any other is sent as tiles."""

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
    if isinstance(bias, DistanceBias):
        # Distances between the positions' ends are all that is looked up; a longer table would be sent in vain.
        last = int(bias.query.max() - bias.key.min()) - bias.first
        table = at_least_float32(bias.table)[:, : max(1, last + 1)].float()
        return {
            "kind": "distance",
            "first": bias.first,
            "table": packed(_array(table), smooth=True),
            "query": _positions(bias.query),
            "key": _positions(bias.key),
        }
    if isinstance(bias, LevelBias):
        return {"kind": "level", **_levels(bias.query_level, bias.key_level, bias.slope)}
    if isinstance(bias, LineBias):
        return {
            "kind": "line",
            "curve": _bias(bias.curve),
            "factor": packed(_array(bias.factor[0].double())),
            **{name: packed(_array(getattr(bias, name).double())) for name in ("knots", "slope", "intercept")},
        }
    if isinstance(bias, FunctionBias):
        names = [name for name, function in TILES.items() if function is bias.function]
        name = FUNCTIONS.get(names[0]) if names else None
        if name == "k-cable":
            return {"kind": "function", "function": name, **_levels(*bias.tensors)}
        if name is not None:
            query, key, *rest = bias.tensors
            tensors = [packed(_array(x.double())) for x in rest]
            return {
                "kind": "function",
                "function": name,
                "query": _positions(query),
                "key": _positions(key),
                "tensors": tensors,
                "heads": bias.shape[1],
            }
    return None


def _levels(query: Tensor, key: Tensor, slope: Tensor) -> dict[str, Any]:
    same = query.shape == key.shape and torch.equal(query, key)
    return {
        "query": packed(_array(query[0].double()), bits=LEVEL),
        "key": None if same else packed(_array(key[0].double()), bits=LEVEL),
        "slope": packed(_array(at_least_float32(slope)[0].float())),
    }


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
