"""Positions to train at other than 0, 1, 2, ...: a short sequence that stands for a part of a long one.

    random:8192   as many of the positions 0 to 8191 as there are tokens, in order (Ruoss et al. 2023, arXiv 2305.16843)
    pose:8        the sequence in two chunks, the second moved on so that positions reach up to eight times the training
                  length (PoSE, Zhu et al. 2023, arXiv 2309.10400); the text itself stays whole

Each sequence of a run has its own, drawn from the run's seed and the sequence's number: what a resumed run draws is
what the run that was not stopped would have drawn. Held-out text is read at plain positions.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class PositionRule:
    """How positions are drawn, and how many there are to draw from."""

    kind: Literal["random", "pose"]
    limit: int

    @staticmethod
    def parse(text: str, length: int) -> "PositionRule":
        """The rule that an option names, for sequences of a length.

        >>> PositionRule.parse("pose:8", 128).limit
        1024
        """
        match = re.fullmatch(r"(random|pose):(\d+)", text)
        if match is None:
            raise ValueError(f"positions must be random:LIMIT or pose:FACTOR, e.g. random:8192, got {text!r}")
        number = int(match[2])
        if match[1] == "random":
            if number < length:
                raise ValueError(f"random positions must be at least as many as the length, {length}, got {number}")
            return PositionRule("random", number)
        if number < 2:
            raise ValueError(f"the factor of pose must be 2 or more, got {number}")
        return PositionRule("pose", number * length)

    def draw(self, first: int, count: int, length: int, *, seed: int) -> Int[Tensor, "batch position"]:
        """The positions of sequences `first` to `first + count` of a run, rising in each."""
        rows = [self._one(np.random.default_rng([seed, first + i]), length) for i in range(count)]
        return torch.from_numpy(np.stack(rows))

    def _one(self, generator: np.random.Generator, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if self.kind == "random":
            return np.sort(generator.choice(self.limit, length, replace=False)).astype(np.int64)
        positions = np.arange(length)
        positions[generator.integers(1, length) :] += generator.integers(0, self.limit - length + 1)
        return positions
