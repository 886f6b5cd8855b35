"""Position maps in one safetensors file: numbers as tensors, everything else as JSON in its header.

Nothing is pickled, and a function is stored by name and looked up among the registered ones: a file cannot run code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lengthwise.bias import rebuild
from lengthwise.files import replacing
from lengthwise.views.described_scores import ContentScores, NetworkBias
from lengthwise.views.maps import LayerMap, LayerMaps, Profile
from lengthwise.views.tiles import Tiles

STORED = (ContentScores, NetworkBias)
"""Kinds that a file can hold beside those of `lengthwise.bias`: importing them makes them known by name."""

FORM = "lengthwise position maps 3"
"""The first entry of the header; a change of the format changes the number."""


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
