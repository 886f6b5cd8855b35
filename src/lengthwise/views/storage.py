"""Position maps in one safetensors file: numbers as tensors, everything else as JSON in its header.

Nothing is pickled, and a function is kept by name and looked up among the registered tiles, so a file cannot run code.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lengthwise.bias import TILES, Bias, DistanceBias, FunctionBias, LevelBias
from lengthwise.views.maps import LayerMap, PositionMaps, Profile
from lengthwise.views.tiles import Tiles

FORM = "lengthwise position maps 1"
"""What the header says first; a change of the form changes the number."""

Parts = Mapping[str, Tensor]


def save_maps(maps: PositionMaps, path: str | Path) -> Path:
    """Write the file whole or not at all."""
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    layers = [_pack(one, f"{index}.", tensors) for index, one in enumerate(maps.maps)]
    about = {
        name: getattr(maps, name) for name in ("model", "encoding", "what", "part", "sequences", "shown", "tokens")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(
            {name: _kept(tensor) for name, tensor in tensors.items()},
            half,
            {"form": FORM, "about": json.dumps(about), "layers": json.dumps(layers)},
        )
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path


def load_maps(path: str | Path) -> PositionMaps:
    """Read what `PositionMaps.save` wrote."""
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as fault:
        raise ValueError(f"{path} must be a file of position maps; it cannot be read: {fault}. Save it anew.") from None
    if header.get("form") != FORM:
        raise ValueError(f"{path} must be a file of position maps; its header says otherwise. Use PositionMaps.save.")
    about = json.loads(header["about"])
    about["tokens"] = None if about["tokens"] is None else tuple(about["tokens"])
    layers = [_unpack(said, f"{index}.", tensors) for index, said in enumerate(json.loads(header["layers"]))]
    return PositionMaps(**about, maps=tuple(layers))


def _pack(one: LayerMap, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One layer: its tensors under a prefix, the rest returned."""
    parts = {
        "profile.mean": one.profile.mean,
        "profile.spread": one.profile.spread,
        "context": one.context_dependence,
        "diagonal": one.diagonal_spread,
    }
    if one.kernel is not None:
        parts["kernel"] = one.kernel
    if one.tiles is not None:
        names = ("mean",) if one.tiles.exact else ("mean", "least", "greatest")
        parts |= {f"tiles.{name}": getattr(one.tiles, name) for name in names}
    said = None if one.described is None else _pack_bias(one.described, parts)
    tensors |= {prefix + name: tensor for name, tensor in parts.items()}
    return {
        "layer": one.layer,
        "queries": one.queries,
        "keys": one.keys,
        "causal": one.causal,
        "first": one.profile.first,
        "pool": one.tiles and one.tiles.pool,
        "bias": said,
    }


def _unpack(said: dict[str, Any], prefix: str, tensors: Parts) -> LayerMap:
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    tiles = None
    if said["pool"] is not None:
        mean = parts["tiles.mean"]
        tiles = Tiles(said["pool"], mean, parts.get("tiles.least", mean), parts.get("tiles.greatest", mean))
    return LayerMap(
        layer=said["layer"],
        queries=said["queries"],
        keys=said["keys"],
        causal=said["causal"],
        described=None if said["bias"] is None else _unpack_bias(said["bias"], parts),
        tiles=tiles,
        profile=Profile(said["first"], parts["profile.mean"], parts["profile.spread"]),
        context_dependence=parts["context"],
        diagonal_spread=parts["diagonal"],
        kernel=parts.get("kernel"),
    )


def _pack_bias(bias: Bias, parts: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(bias, DistanceBias):
        parts |= {f"bias.{name}": getattr(bias, name) for name in ("table", "query", "key")}
        return {"kind": "distance", "first": bias.first}
    if isinstance(bias, LevelBias):
        parts |= {f"bias.{name}": getattr(bias, name) for name in ("query_level", "key_level", "slope")}
        return {"kind": "level"}
    assert isinstance(bias, FunctionBias), "inspect keeps no other kind described"
    parts |= {f"bias.{index}": tensor for index, tensor in enumerate(bias.tensors)}
    (name,) = [name for name, function in TILES.items() if function is bias.function]
    return {"kind": "function", "function": name, "tensors": len(bias.tensors)}


def _unpack_bias(said: dict[str, Any], parts: Parts) -> Bias:
    if said["kind"] == "distance":
        return DistanceBias(parts["bias.table"], parts["bias.query"], parts["bias.key"], said["first"])
    if said["kind"] == "level":
        return LevelBias(parts["bias.query_level"], parts["bias.key_level"], parts["bias.slope"])
    if said["function"] not in TILES:
        raise ValueError(
            f"the file's bias is computed by {said['function']!r}, which must be registered; it is not. "
            "Import the module of its encoding first."
        )
    tensors = tuple(parts[f"bias.{index}"] for index in range(cast(int, said["tensors"])))
    return FunctionBias(TILES[said["function"]], tensors)


def detached(bias: Bias) -> Bias | None:
    """The first sequence's share of a bias that has structure, on the CPU and without gradient; None if it has none."""
    if isinstance(bias, DistanceBias):
        return DistanceBias(_kept(bias.table), _kept(bias.query[:1]), _kept(bias.key[:1]), bias.first)
    if isinstance(bias, LevelBias):
        return LevelBias(*(_kept(part[:1]) for part in bias.sources))
    if isinstance(bias, FunctionBias) and bias.shape[0] == 1 and bias.function in TILES.values():
        return FunctionBias(bias.function, tuple(map(_kept, bias.tensors)))
    return None


def _kept(x: Tensor) -> Tensor:
    """A copy of its own: tensors that share memory cannot be told apart in a file."""
    return torch.clone(x.detach().cpu(), memory_format=torch.contiguous_format)
