"""The held-out loss at several lengths while a run trains: a quick look; `lengthwise evaluate` is the measurement."""

import logging

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from lengthwise.data import Tokens
from lengthwise.data.tokens import document_positions
from lengthwise.encodings import Encoding
from lengthwise.train.config import Settings
from lengthwise.train.processes import World

log = logging.getLogger(__name__)


class HeldOut:
    """Sequences from the start of the held-out text, the same at every measurement, at each of a few lengths."""

    def __init__(self, config: Settings, tokens: Tokens, model: nn.Module) -> None:
        self.config, self.tokens = config, tokens
        limit = min((e.limit for e in model.modules() if isinstance(e, Encoding) and e.limit), default=None)
        self.lengths = config.evaluate_lengths or [config.length, 2 * config.length, 4 * config.length]
        must = self.lengths if config.evaluate_lengths else self.lengths[:1]
        for length in list(self.lengths):
            if len(tokens) < length:
                fault = f"the held-out split has {len(tokens)} tokens"
            elif limit is not None and length > limit:
                fault = f"the encoding {config.encoding!r} ends at {limit}"
            else:
                continue
            if length in must:
                raise ValueError(
                    f"the held-out loss must be measured at {length} tokens; {fault}. "
                    "Give --held_out with more text, or other --evaluate_lengths."
                )
            log.info("the held-out loss is not measured at %d tokens: %s", length, fault)
            self.lengths.remove(length)

    def sample(self) -> Int[Tensor, "batch position"]:
        """Two sequences of the training length: what the snapshots of the position maps are taken on."""
        length = self.config.length
        count = min(2, len(self.tokens) // length)
        return torch.from_numpy(self.tokens.read(0, count * length)).view(count, length)

    @torch.no_grad()
    def losses(self, objective: nn.Module, world: World, precision: torch.dtype) -> dict[str, float]:
        """The mean loss of a token, by length."""
        objective.eval()
        with torch.autocast(world.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
            found = {str(length): self._loss(objective, length, world) for length in self.lengths}
        objective.train()
        return found

    def _loss(self, objective: nn.Module, length: int, world: World) -> float:
        count = max(1, min(self.config.evaluate_tokens, len(self.tokens)) // length)
        at_once = min(count, max(1, self.config.micro_batch * self.config.length // length))
        starts = range(0, count, at_once)
        total = torch.zeros(2, dtype=torch.float64)
        # Every process makes as many calls as every other, or sharded ones would wait for each other for ever.
        for turn in range(0, len(starts), world.size):
            mine = turn + world.rank
            first = starts[min(mine, len(starts) - 1)]
            rows = [self.tokens.read(i * length, length) for i in range(first, min(first + at_once, count))]
            tokens = torch.from_numpy(np.stack(rows))
            positions = document_positions(tokens, self.tokens.end) if self.config.separate_documents else None
            loss = objective(tokens.to(world.device), None if positions is None else positions.to(world.device))
            if mine < len(starts):
                total += torch.tensor([float(loss), tokens.numel() - len(rows)], dtype=torch.float64)
        losses, targets = world.sum(total.to(world.device)).tolist()
        return losses / targets
