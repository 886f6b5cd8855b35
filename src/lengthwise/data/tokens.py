"""Token files, and the order in which a training run reads them.

A corpus is shards of integers in memory maps, each with a sidecar that has its checksum:

    shard-00000.bin     uint16 or uint32, little-endian
    shard-00000.json    {"tokens": ..., "documents": ..., "dtype": ..., "sha256": ...}

The order is a function of seed and step alone, however many processes there are. The row of tokens is cut into
sequences of `length`, each starting with the last token of the one before, so that every token but the first is
predicted once an epoch. Each epoch has its own shuffle. A position in the data is a number of sequences; there is no
other state.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from lengthwise.errors import check_int
from lengthwise.files import file_hash, write_atomic


@dataclass(frozen=True)
class Shard:
    """The sidecar of a shard."""

    tokens: int
    documents: int
    dtype: str
    sha256: str

    @staticmethod
    def read(path: Path) -> "Shard":
        """Read the sidecar beside a shard."""
        return Shard(**json.loads(path.with_suffix(".json").read_text()))

    def write(self, path: Path) -> None:
        """Write the sidecar beside the shard: only then is the shard complete."""
        write_atomic(path.with_suffix(".json"), json.dumps(asdict(self)) + "\n")

    def fault(self, path: Path, *, deep: bool) -> str | None:
        """What is wrong with the shard's file, or None; `deep` reads all of it."""
        expected = self.tokens * np.dtype(self.dtype).itemsize
        size = path.stat().st_size if path.exists() else 0
        if size != expected:
            return f"expected {expected} bytes by its sidecar, got {size}"
        if deep and file_hash(path) != self.sha256:
            return "its checksum differs from that in its sidecar"
        return None


class Tokens:
    """The tokens of one split as one long row, whatever files they are in."""

    def __init__(self, paths: Sequence[Path], shards: Sequence[Shard], *, end: int) -> None:
        self.paths, self.shards, self.end = list(paths), list(shards), end
        self._maps = [np.memmap(path, dtype=shard.dtype, mode="r") for path, shard in zip(paths, shards, strict=True)]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from the `first` on; an IndexError beyond the end."""
        if first < 0 or first + count > len(self):
            raise IndexError(f"tokens must be from 0 to {len(self)}, got {first} to {first + count}")
        out = np.empty(count, dtype=np.int64)
        filled, shard = 0, bisect_right(self._starts, first) - 1
        while filled < count:
            offset = first + filled - self._starts[shard]
            piece = self._maps[shard][offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled, shard = filled + len(piece), shard + 1
        return out

    @property
    def sha256(self) -> str:
        """The checksum of all shards' checksums: corpora with equal ones are equal."""
        return hashlib.sha256(" ".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


class Batches:
    """Sequences in their shuffled order, endlessly."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int, split: str = "train") -> None:
        check_int("length", length, least=2)
        self.tokens, self.length, self.seed = tokens, length, seed
        self.sequences = max(0, (len(tokens) - 1) // (length - 1))
        if not self.sequences:
            raise ValueError(
                f"the {split} split must have at least one sequence of {length} tokens, got {len(tokens)} tokens; give "
                "more text, or a smaller length"
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int[Tensor, " sequence"]:
        # Mixed by numpy's hash of both numbers: seed + epoch would give seed 1 the second epoch of seed 0.
        mixed_seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return torch.randperm(self.sequences, generator=torch.Generator().manual_seed(mixed_seed))

    def read(self, first: int, count: int) -> Int[Tensor, "sequence position"]:
        """`count` sequences, the first of them number `first` since training began."""
        rows = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.sequences)
            rows.append(self.tokens.read(int(self._order(epoch)[place]) * (self.length - 1), self.length))
        return torch.from_numpy(np.stack(rows))


def document_positions(tokens: Int[Tensor, "batch position"], end: int) -> Int[Tensor, "batch position"]:
    """Positions that restart after every end-of-text token: with them the model keeps documents apart.

    >>> document_positions(torch.tensor([[5, 0, 6, 7, 0, 8]]), end=0)
    tensor([[0, 1, 0, 1, 2, 0]])
    """
    slots = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(tokens[:, :-1] == end, slots[:, 1:], 0)
    return slots - starts.cummax(1).values
