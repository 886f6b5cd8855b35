"""What is measured while a run trains: the held-out loss at several lengths, and snapshots of the position maps.

The held-out loss is a quick estimate; `lengthwise evaluate` is the measurement.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lengthwise.data import Tokens
from lengthwise.inspect import position_maps
from lengthwise.model.families import max_length
from lengthwise.model.fit import fit_of
from lengthwise.model.modeling import LengthwisePreTrainedModel
from lengthwise.train.checkpoint import whole_weights
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import World
from lengthwise.views import Quantity

log = logging.getLogger(__name__)
T = TypeVar("T")
RESOLUTION = 128
"""Tiles along a side of a map that has no structure to describe it by."""

SEED = 0
"""Of what is drawn for held-out sequences: the same every time, and in every run."""


class TargetRule(Protocol):
    """Which tokens of a sequence are predicted."""

    def targets(self, length: int) -> int:
        """How many of a sequence."""
        ...

    def draw(self, ids: Tensor, first: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """What the model reads, and the labels; `first` is the number of the first sequence."""
        ...


class Validation:
    """Sequences from the start of the held-out text, the same every time, at each of a few lengths."""

    def __init__(self, config: ResolvedTrainConfig, tokens: Tokens, model: nn.Module, rule: TargetRule) -> None:
        self.config, self.tokens, self.rule = config, tokens, rule
        limit = max_length(model)
        self.lengths = config.evaluate_lengths or [config.length, 2 * config.length, 4 * config.length]
        required = self.lengths if config.evaluate_lengths else self.lengths[:1]
        for length in list(self.lengths):
            if len(tokens) < length:
                fault = f"the held-out split has {len(tokens)} tokens"
            elif limit is not None and length > limit:
                fault = f"the encoding {config.encoding or config.layers!r} ends at {limit}"
            else:
                continue
            if length in required:
                raise ValueError(
                    f"the held-out loss cannot be measured at {length} tokens: {fault}; give --held-out with more "
                    "text, or other --evaluate-lengths"
                )
            log.info("the held-out loss is not measured at %d tokens: %s", length, fault)
            self.lengths.remove(length)

    def sample(self) -> Int[Tensor, "batch position"]:
        """Two sequences of the training length, for the snapshots of the position maps."""
        length = self.config.length
        count = min(2, len(self.tokens) // length)
        return self.tokens.windows([i * length for i in range(count)], length)

    @torch.no_grad()
    def losses(self, loss: nn.Module, world: World, dtype: torch.dtype) -> dict[str, float]:
        """The mean loss of a token, by length."""
        loss.eval()
        with world.autocast(dtype):
            means = {str(length): self._mean_loss(loss, length, world) for length in self.lengths}
        loss.train()
        return means

    def _mean_loss(self, loss: nn.Module, length: int, world: World) -> float:
        count = max(1, min(self.config.evaluate_tokens, len(self.tokens)) // length)
        at_once = min(count, max(1, self.config.micro_batch * self.config.length // length))

        def measure(first: int) -> tuple[Tensor, int]:
            tokens = self.tokens.windows([i * length for i in range(first, min(first + at_once, count))], length)
            positions = self.tokens.document_positions(tokens) if self.config.separate_documents else None
            inputs = *self.rule.draw(tokens, first, seed=SEED), positions
            nats = loss(*map(world.put, inputs))
            return nats, len(tokens) * self.rule.targets(length) if world.is_first_of_ring else 0

        return mean_over_processes(range(0, count, at_once), measure, world)


def mean_over_processes(parts: Sequence[T], measure: Callable[[T], tuple[Tensor, int]], world: World) -> float:
    """The sum of what each part has, divided by the sum of the counts; every part is measured by one process."""
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    # Every process makes as many calls as every other, or sharded ones would wait for each other for ever.
    for turn in range(0, len(parts), world.readers):
        own = turn + world.reader
        value, count = measure(parts[min(own, len(parts) - 1)])
        if own < len(parts):
            total[0] += value
            total[1] += count
    every, counts = world.sum(total).tolist()
    return every / counts


def save_map_snapshot(path: Path, model: PreTrainedModel, ids: Int[Tensor, "batch position"], world: World) -> None:
    """The bias of every head of every layer, or the scores of an encoding without one. All processes take part."""
    weights = whole_weights(model) if world.sharded else None
    if not world.is_first:
        return
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if weights is not None:
            with world.device:
                model = type(model)(model.config)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(weights[name])
        quantity: Quantity = "bias" if _adds_bias(model) else "scores"
        maps = position_maps(model, ids.to(world.device), "all", quantity, shown="first", resolution=RESOLUTION)
    maps.save(path)


def _adds_bias(model: PreTrainedModel) -> bool:
    """Whether every layer has a bias."""
    if isinstance(model, LengthwisePreTrainedModel):
        return model.config.overrides("bias", everywhere=True)
    current = fit_of(model)
    held = [] if current is None else list(current.encodings.values())
    return bool(held) and all(encoding.overrides("bias") for encoding in held)
