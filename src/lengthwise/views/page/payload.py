"""The JSON that is sent to the page: described biases as they are described, everything else as tiles.

Arrays are text: rounded, bytes of equal weight side by side, deflated, base64. Side by side, signs and exponents of
neighbours look alike and nearly vanish, and so do bits that rounding cleared: a tile takes about 3 bytes of the file
instead of 16. A smooth table is sent as second differences of its bits, read as integers: every float32 comes back to
the last bit, in less than a third of its bytes. numbers.js reads them.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lengthwise.bias import Bias
from lengthwise.views.maps import LayerMap, LayerMaps, Quantity
from lengthwise.views.tiles import Tiles

KINDS = ("DistanceBias", "QueryDistanceBias", "LevelBias", "LineBias", "FunctionBias", "SumBias")
FUNCTIONS = (
    "lengthwise.encodings.fire.fire_tile",
    "lengthwise.encodings.kerple.kerple_log",
    "lengthwise.encodings.kerple.kerple_power",
)
"""Kinds and functions that matrix.js has too; anything else is sent as tiles."""

TILE, BOUND, CELL, LEVEL = 10, 7, 15, 32
"""Bits kept after the first: a tile's mean, its bounds (rounded outwards), a single cell, and a level of float64."""

SIDE = 256
"""Tiles along a side for a function that the page does not have."""

Detail = Mapping[tuple[int, int], Tensor]
"""Every number of single heads, by layer and head: (query, key) each."""

Side = Literal["nearest", "down", "up"]
MANTISSA = {4: 23, 8: 52}


def view_payload(maps: LayerMaps, detail: Detail | None = None) -> list[dict[str, Any]]:
    """All layers of one view."""
    return [
        {"label": maps.layer_label(layer_map.layer)}
        | _layer(layer_map, {head: x for (layer, head), x in (detail or {}).items() if layer == layer_map.layer})
        for layer_map in maps.maps
    ]


def tokens_of(views: Mapping[Quantity, LayerMaps]) -> list[str] | None:
    """The tokens, if any view has them."""
    return next((list(maps.tokens) for maps in views.values() if maps.tokens is not None), None)


def _layer(layer_map: LayerMap, detail: Mapping[int, Tensor]) -> dict[str, Any]:
    described = None if layer_map.described is None else _bias(layer_map.described)
    tiles = layer_map.tiles if layer_map.described is None else None if described else layer_map.pooled(SIDE)
    uniform = described and not layer_map.diagonal_spread.any() and not layer_map.context_dependence.any()
    return {
        "layer": layer_map.layer,
        "heads": layer_map.heads,
        "queries": layer_map.queries,
        "keys": layer_map.keys,
        "causal": layer_map.causal,
        "context": [None if bool(x.isnan()) else float(x) for x in layer_map.context_dependence],
        "diagonal": [float(x) for x in layer_map.diagonal_spread],
        "asymmetry": None if layer_map.causal else [None if bool(x.isnan()) else float(x) for x in layer_map.asymmetry],
        "matrix": described or (None if tiles is None else _tiles(tiles)),
        # Where only distance matters the page reads the profile off the last row.
        "profile": None
        if uniform and layer_map.causal
        else {
            "first": layer_map.profile.first,
            "mean": packed(_array(layer_map.profile.mean), bits=TILE),
            "spread": packed(_array(layer_map.profile.spread), bits=BOUND),
        },
        "range": _range(layer_map),
        "kernel": None if layer_map.kernel is None else packed(_array(layer_map.kernel), bits=TILE),
        "detail": {str(head): packed(_array(x), bits=CELL) for head, x in detail.items()},
    }


def _range(layer_map: LayerMap) -> list[list[float]]:
    """The least and the greatest number of every head, of all its pairs; 0 and 0 where it has none."""
    bias, queries, causal = layer_map.described, layer_map.queries, layer_map.causal
    if bias is None and layer_map.tiles is None:
        parts = [layer_map.profile.mean]
    elif bias is not None and bias.is_uniform and queries == layer_map.keys:
        # The last row has every distance from 0 on, and the first every one below.
        rows = [queries - 1] if causal else [0, queries - 1]
        parts = [bias.tile(slice(row, row + 1), slice(None))[0, :, 0] for row in rows]
    else:
        tiles = layer_map.pooled(SIDE)
        parts = [tiles.least.flatten(1), tiles.greatest.flatten(1)]
    x = torch.cat([part.detach().double() for part in parts], 1)
    finite = x.isfinite()
    least, greatest = x.masked_fill(~finite, torch.inf).amin(1), x.masked_fill(~finite, -torch.inf).amax(1)
    some = finite.any(1)
    ends: list[list[float]] = torch.stack([least.where(some, 0), greatest.where(some, 0)], 1).add(0).tolist()
    return ends


def _tiles(tiles: Tiles) -> dict[str, Any]:
    payload: dict[str, Any] = {"kind": "tiles", "pool": tiles.pool}
    payload["mean"] = packed(_array(tiles.mean), bits=CELL if tiles.exact else TILE)
    if not tiles.exact:
        payload["least"] = packed(_array(tiles.least), bits=BOUND, side="down")
        payload["greatest"] = packed(_array(tiles.greatest), bits=BOUND, side="up")
    return payload


def _bias(bias: Bias) -> dict[str, Any] | None:
    """A described bias, or None where the page cannot fill it in."""
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
    array: np.ndarray = x.detach().cpu().numpy()
    return array


def packed(x: np.ndarray, *, bits: int = 52, side: Side = "nearest", smooth: bool = False) -> dict[str, Any]:
    """An array for `numbers()` of numbers.js: float64 stays so, all else is float32; no number keeps more than `bits`.

    The error is at most 2 ** -(bits + 1) of the number, or twice that where it is rounded to one side.
    """
    x = np.ascontiguousarray(x, dtype=np.float64 if x.dtype == np.float64 else np.float32)
    # 0 - 0 has no minus sign, which a reader would take for a small number.
    words = rounded(x + x.dtype.type(0), bits, side)
    if smooth:
        words = differences(words)
    planes = words.reshape(-1, 1).view(np.uint8).T
    # Noise has nothing to compress but runs: searching for those alone is ten times as fast, and no larger.
    deflate = zlib.compressobj(strategy=zlib.Z_DEFAULT_STRATEGY if smooth else zlib.Z_RLE)
    deflated = deflate.compress(np.ascontiguousarray(planes).tobytes()) + deflate.flush()
    text = base64.b64encode(deflated).decode()
    return {"shape": list(x.shape), "bytes": x.itemsize, "smooth": smooth, "text": text}


def rounded(x: np.ndarray, bits: int, side: Side) -> np.ndarray:
    """The bit patterns of numbers rounded to `bits` bits after the first; infinities and NaN as they are."""
    words: Any = x.view(np.uint32 if x.itemsize == 4 else np.uint64)
    drop = MANTISSA[x.itemsize] - bits
    if drop <= 0:
        return words
    dropped, half = (words.dtype.type(value) for value in (2**drop - 1, 2 ** (drop - 1)))
    if side == "nearest":
        raised = words + half
    else:
        # Cutting bits leads towards 0; one step more leads away from it, where the bound needs that.
        away = (x < 0) if side == "down" else (x > 0)
        raised = np.where(away, words + dropped, words)
    return np.asarray(np.where(np.isfinite(x), raised & ~dropped, words))


def differences(words: np.ndarray) -> np.ndarray:
    """Second differences along the last axis of float32 bit patterns, taken as integers; small ones have few bits."""
    assert words.dtype == np.uint32, "only tables are smooth, and they are float32"
    signed = words.view(np.int32).astype(np.int64)
    integers = np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)
    twice = np.diff(integers, n=1, axis=-1, prepend=0)
    twice = np.diff(twice, n=1, axis=-1, prepend=0).astype(np.int32)
    return ((twice << 1) ^ (twice >> 31)).view(np.uint32)
