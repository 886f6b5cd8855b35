"""The order in which a training run reads its tokens: a function of seed and step alone, whatever the processes.

The row of tokens is cut into sequences of `length`, each starting with the last token of the one before, so that every
token but the first is predicted once an epoch. Each epoch has its own shuffle. A position in the data is a number of
sequences; there is nothing else to remember.
"""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.data.tokens import Tokens
from lengthwise.errors import check_int


class Batches:
    """Sequences in their shuffled order, endlessly."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int, what: str = "train") -> None:
        check_int("length", length, "One token predicts nothing.", least=2)
        self.tokens, self.length, self.seed = tokens, length, seed
        self.sequences = max(0, (len(tokens) - 1) // (length - 1))
        if not self.sequences:
            raise ValueError(
                f"the {what} split must have one sequence of {length} tokens at least; it has {len(tokens)} tokens. "
                "Give more text, or a smaller length."
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int[Tensor, " sequence"]:
        # Mixed by numpy's hash of both numbers: seed + epoch would give seed 1 the second epoch of seed 0.
        mixed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return torch.randperm(self.sequences, generator=torch.Generator().manual_seed(mixed))

    def read(self, first: int, count: int) -> Int[Tensor, "sequence position"]:
        """`count` sequences from the `first` one ever on."""
        rows = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.sequences)
            rows.append(self.tokens.read(int(self._order(epoch)[place]) * (self.length - 1), self.length))
        return torch.from_numpy(np.stack(rows))


def document_positions(tokens: Int[Tensor, "batch position"], end: int) -> Int[Tensor, "batch position"]:
    """Positions that begin anew after every end-of-text token: with them the model keeps documents apart.

    >>> document_positions(torch.tensor([[5, 0, 6, 7, 0, 8]]), end=0)
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = torch.where(tokens[:, :-1] == end, places[:, 1:], 0)
    return places - begins.cummax(1).values
