"""Position maps in one safetensors file: numbers as tensors, everything else as JSON in its header.

Nothing is pickled, and a function is kept by name and looked up among the registered ones, so a file cannot run code.
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
from lengthwise.views.maps import LayerMap, PositionMaps, Profile
from lengthwise.views.tiles import Tiles

FORM = "lengthwise position maps 2"
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
    with replacing(path) as partial:
        save_file(
            {name: _kept(tensor) for name, tensor in tensors.items()},
            partial,
            {"form": FORM, "about": json.dumps(about), "layers": json.dumps(layers)},
        )
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
    bias = None
    if one.described is not None:
        parts |= {f"bias.{name}": tensor for name, tensor in one.described.tensors().items()}
        bias = {"kind": type(one.described).__name__, "static": one.described.static()}
    tensors |= {prefix + name: tensor for name, tensor in parts.items()}
    return {
        "layer": one.layer,
        "queries": one.queries,
        "keys": one.keys,
        "causal": one.causal,
        "first": one.profile.first,
        "pool": one.tiles and one.tiles.pool,
        "bias": bias,
    }


def _unpack(said: dict[str, Any], prefix: str, tensors: Parts) -> LayerMap:
    parts = _under(prefix, tensors)
    described = None
    if said["bias"] is not None:
        described = rebuild(said["bias"]["kind"], _under("bias.", parts), said["bias"]["static"])
    tiles = None
    if said["pool"] is not None:
        mean = parts["tiles.mean"]
        tiles = Tiles(said["pool"], mean, parts.get("tiles.least", mean), parts.get("tiles.greatest", mean))
    return LayerMap(
        layer=said["layer"],
        queries=said["queries"],
        keys=said["keys"],
        causal=said["causal"],
        described=described,
        tiles=tiles,
        profile=Profile(said["first"], parts["profile.mean"], parts["profile.spread"]),
        context_dependence=parts["context"],
        diagonal_spread=parts["diagonal"],
        kernel=parts.get("kernel"),
    )


def _under(prefix: str, tensors: Parts) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _kept(x: Tensor) -> Tensor:
    """A copy of its own: tensors that share memory cannot be told apart in a file."""
    return torch.clone(x.detach().cpu(), memory_format=torch.contiguous_format)
