"""Token files: a corpus as shards of integers in memory maps, each with a sidecar that tells its checksum.

shard-00000.bin     uint16 or uint32, little-endian
shard-00000.json    {"tokens": ..., "documents": ..., "dtype": ..., "sha256": ...}
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lengthwise.files import file_hash, write_atomic


@dataclass(frozen=True)
class Shard:
    """What the sidecar says."""

    tokens: int
    documents: int
    dtype: str
    sha256: str

    @staticmethod
    def read(path: Path) -> "Shard":
        """The sidecar of a shard."""
        return Shard(**json.loads(path.with_suffix(".json").read_text()))

    def write(self, path: Path) -> None:
        """Put the sidecar beside the shard: only then is the shard whole."""
        write_atomic(path.with_suffix(".json"), json.dumps(asdict(self)) + "\n")

    def fault(self, path: Path, *, deep: bool) -> str | None:
        """What is wrong with the shard's file, or None; `deep` reads all of it."""
        wanted = self.tokens * np.dtype(self.dtype).itemsize
        found = path.stat().st_size if path.exists() else 0
        if found != wanted:
            return f"it has {found} bytes and its sidecar says {wanted}"
        if deep and file_hash(path) != self.sha256:
            return "its checksum is not the one that its sidecar says"
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
            raise IndexError(f"tokens {first} to {first + count} were asked for; there are {len(self)}. Ask for fewer.")
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
        """The checksum of all shards' checksums: two corpora with the same one are the same."""
        return hashlib.sha256(" ".join(shard.sha256 for shard in self.shards).encode()).hexdigest()
