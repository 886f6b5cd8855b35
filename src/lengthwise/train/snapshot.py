"""The position maps of every head while a run trains, so that how they moved can be drawn afterwards."""

from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.encodings import ENCODINGS
from lengthwise.inspect import position_maps
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.train.keeping import whole_weights
from lengthwise.train.processes import World
from lengthwise.views import What

RESOLUTION = 128
"""Tiles along a side of a map that has no structure to describe it by."""


def save_snapshot(path: Path, model: LengthwiseForCausalLM, ids: Int[Tensor, "batch position"], world: World) -> None:
    """The bias of every head of every layer, or the scores of an encoding without one. All processes take part."""
    weights = whole_weights(model) if world.sharded else None
    if not world.is_first:
        return
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if weights is not None:
            with world.device:
                model = LengthwiseForCausalLM(model.config)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(weights[name])
        what: What = "bias" if ENCODINGS[model.config.encoding].overrides("bias") else "scores"
        maps = position_maps(model, ids.to(world.device), "all", what, shown="first", resolution=RESOLUTION)
    maps.save(path)
