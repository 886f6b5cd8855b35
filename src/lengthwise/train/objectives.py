"""What a run learns, and from what: the next token, or masked tokens. Contrastive training is in contrastive.py.

An objective has the data and the tokenizer, makes the model, and gives the inputs of any part of a step. Everything
that it draws is a function of the seed and of the number of a sequence since training began, so that a run that was
resumed, or that has other processes, draws the same.

    causal    every token is predicted from those before it
    mlm       some tokens are predicted from all others (BERT, Devlin et al. 2019): of the chosen ones 80 % are masked,
              10 % replaced by a random token, and 10 % left as they are
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lengthwise.data import Batches
from lengthwise.distributed import ring_loss
from lengthwise.distributed.model import check_spreadable
from lengthwise.model import LengthwiseConfig
from lengthwise.model.losses import IGNORED
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import World
from lengthwise.train.positions import PositionRule
from lengthwise.train.setup import check_positions, make_model, read_data
from lengthwise.train.theirs import summed_token_loss
from lengthwise.train.validation import Validation

Inputs = tuple[Tensor | None, ...]
"""What the loss takes beside the model."""

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens; the others stay as they are."""


class NextToken:
    """Every token is predicted from those before it."""

    def targets(self, length: int) -> int:
        """How many tokens of a sequence are predicted."""
        return length - 1

    def draw(self, ids: Int[Tensor, "batch token"], first: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """What the model reads, and the labels; `first` is the number of the first sequence."""
        return ids, ids


@dataclass(frozen=True)
class MaskedTokens:
    """A fixed share of every sequence is predicted; special tokens only where there are too few others."""

    mask: int
    vocabulary: int
    special: tuple[int, ...]
    rate: float = 0.15

    def targets(self, length: int) -> int:
        """How many tokens of a sequence are predicted."""
        return max(1, round(self.rate * length))

    def draw(self, ids: Int[Tensor, "batch token"], first: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """What the model reads, and the labels; `first` is the number of the first sequence."""
        read, labels = ids.clone(), torch.full_like(ids, IGNORED)
        count = self.targets(ids.shape[1])
        for row in range(ids.shape[0]):
            # A third number: drawn positions take two, of the same seed.
            generator = np.random.default_rng([seed, first + row, 1])
            order = generator.random(ids.shape[1]) + np.isin(ids[row].numpy(), self.special)
            chosen = torch.from_numpy(np.sort(np.argsort(order, kind="stable")[:count]))
            fate, words = generator.random(count), generator.integers(0, self.vocabulary, count)
            labels[row, chosen] = ids[row, chosen]
            own = np.where(fate < MASKED, self.mask, np.where(fate < MASKED + RANDOM, words, ids[row, chosen].numpy()))
            read[row, chosen] = torch.from_numpy(own)
        return read, labels


class HeldOut(Protocol):
    """What is measured of a run while it trains."""

    def losses(self, loss: torch.nn.Module, world: World, dtype: torch.dtype) -> dict[str, float]:
        """The mean loss by length."""
        ...

    def sample(self) -> Int[Tensor, "batch token"]:
        """A few sequences to draw the position maps of."""
        ...


class Objective(ABC):
    """What a run learns, and from what."""

    tokenizer: PreTrainedTokenizerFast
    data_hashes: dict[str, str]
    """Of what is trained on, `data`, and `held_out`: the same for the same text."""
    targets: int
    """What the summed loss of a step is divided by."""

    @abstractmethod
    def make_model(self) -> PreTrainedModel:
        """The model before its first step."""

    @abstractmethod
    def inputs(self, first: int, count: int) -> Inputs:
        """Of `count` sequences, the first of them number `first` since training began."""

    @abstractmethod
    def loss(self, model: Any, *inputs: Any, world: World) -> Float[Tensor, ""]:
        """The sum of the losses, not the mean: the parts of a batch may differ in size."""

    @abstractmethod
    def held_out(self, model: PreTrainedModel) -> HeldOut:
        """What is measured while the run trains."""

    def check(self, world: World) -> None:  # noqa: B027, most have nothing to refuse
        """An error unless these processes can train it together."""

    def save(self, folder: Path) -> None:
        """Write what the final model's folder has beside weights and config."""
        self.tokenizer.save_pretrained(folder)


class TokenObjective(Objective):
    """Tokens of a text are predicted: the next one, or masked ones."""

    def __init__(self, config: ResolvedTrainConfig) -> None:
        self.config = config
        self.tokenizer, tokens, self.held_out_tokens = read_data(config)
        self.data_hashes = {"data": tokens.sha256, "held_out": self.held_out_tokens.sha256}
        self.batches = Batches(tokens, length=config.length, seed=config.seed)
        self.rule = target_rule(config, self.tokenizer)
        self.targets = config.sequences * self.rule.targets(config.length)

    def make_model(self) -> PreTrainedModel:
        """From its config, with the weights of another one, or a model of transformers that goes on."""
        model = make_model(self.config, self.tokenizer)
        check_positions(self.config, model)
        if self.config.context_parallel > 1 and isinstance(model.config, LengthwiseConfig):
            check_spreadable(model.config)
        return model

    def inputs(self, first: int, count: int) -> Inputs:
        """What is read, the labels, and the positions if they are not those of a plain text."""
        config = self.config
        ids = self.batches.read(first, count)
        positions = self.batches.tokens.document_positions(ids) if config.separate_documents else None
        if config.positions is not None:
            rule = PositionRule.parse(config.positions, config.length)
            positions = rule.draw(first, count, config.length, seed=config.seed)
        return *self.rule.draw(ids, first, seed=config.seed), positions

    def loss(self, model: Any, *inputs: Any, world: World) -> Float[Tensor, ""]:
        """The sum over all targets."""
        read, labels, positions = inputs
        if world.ring is not None:
            return ring_loss(model, read, position_ids=positions, group=world.ring)
        if self.config.goes_on:
            return summed_token_loss(model, read, labels, positions)
        return model.loss(read, labels, position_ids=positions, reduction="sum")

    def held_out(self, model: PreTrainedModel) -> HeldOut:
        """The loss of held-out text at several lengths."""
        return Validation(self.config, self.held_out_tokens, model, self.rule)


def target_rule(config: ResolvedTrainConfig, tokenizer: PreTrainedTokenizerFast) -> NextToken | MaskedTokens:
    """Which tokens are predicted."""
    if config.objective == "causal":
        return NextToken()
    assert tokenizer.mask_token_id is not None
    return MaskedTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids), config.mask_rate)
