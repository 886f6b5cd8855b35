"""Which tokens of a sequence each process has.

Every process has two chunks, one from the start of the sequence and one from its end: under causality the early one
has little work and the late one much, and together all processes have the same. A chunk is sent and worked with in
segments, so that what is held of other processes, and of a block of scores, does not grow with the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SEGMENT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""How many tokens a segment has at most, by kind of device: enough work to be worth a call."""


@dataclass(frozen=True)
class Chunk:
    """A run of slots that one process has; a segment is a part of one."""

    first: int
    count: int
    owner: int
    place: int
    """Where it begins among the owner's tokens."""

    @property
    def stop(self) -> int:
        """The slot behind its last."""
        return self.first + self.count

    @property
    def slots(self) -> slice:
        """All of its slots."""
        return slice(self.first, self.stop)

    @property
    def own(self) -> slice:
        """Where they lie among the owner's tokens."""
        return self.local(self.slots)

    def local(self, slots: slice) -> slice:
        """Where some of its slots lie among the owner's tokens."""
        return slice(self.place + slots.start - self.first, self.place + slots.stop - self.first)


def zigzag(length: int, processes: int) -> list[Chunk]:
    """Two chunks for each process, as long as each other but for one token: the first ones forth, the others back.

    >>> [(chunk.first, chunk.count, chunk.owner) for chunk in zigzag(10, 2)]
    [(0, 2, 0), (2, 3, 1), (5, 2, 1), (7, 3, 0)]
    """
    borders = [i * length // (2 * processes) for i in range(2 * processes + 1)]
    chunks: list[Chunk] = []
    for i in range(2 * processes):
        owner = min(i, 2 * processes - 1 - i)
        # The late chunk of a process lies behind its early one, which has the number of the process.
        place = 0 if i == owner else borders[owner + 1] - borders[owner]
        chunks.append(Chunk(borders[i], borders[i + 1] - borders[i], owner, place))
    return chunks


def owned(process: int, processes: int) -> tuple[int, int]:
    """The numbers of the chunks that a process has."""
    return process, 2 * processes - 1 - process


def cut(chunks: Sequence[Chunk], most: int) -> list[Chunk]:
    """The segments of all chunks in order: as many of each chunk, and of at most so many tokens.

    >>> [(segment.first, segment.count, segment.place) for segment in cut(zigzag(10, 1), 3)]
    [(0, 2, 0), (2, 3, 2), (5, 2, 5), (7, 3, 7)]
    """
    parts = -(-max(chunk.count for chunk in chunks) // most)
    segments = []
    for chunk in chunks:
        borders = [i * chunk.count // parts for i in range(parts + 1)]
        segments += [Chunk(chunk.first + a, b - a, chunk.owner, chunk.place + a) for a, b in pairwise(borders)]
    return segments
