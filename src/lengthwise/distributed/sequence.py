"""The part of a sequence that one process has, and what it needs to know of the tokens of others.

Levels and angles that are sums over tokens are float64 sums of each chunk, and of the chunks before it. A state that
looks at tokens before its own gets the last tokens of the chunks before.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from lengthwise.bias import float64_sums
from lengthwise.distributed.collectives import gathered
from lengthwise.distributed.sharding import Chunk, owned
from lengthwise.token_layout import Band, Ring, TokenLayout, Window
from lengthwise.visibility import Visibility


@dataclass(frozen=True, eq=False)
class SharedSequence(Ring):
    """One process's two chunks of a sequence; `attend` is in layout.py."""

    whole: TokenLayout
    slots: Int[Tensor, " token"]
    pieces: tuple[tuple[slice, int], ...]
    chunks: list[Chunk]
    segments: list[Chunk]
    """Of all chunks, in order."""
    group: ProcessGroup | None
    rank: int
    size: int
    _visible: dict[Window | None, list[slice]] = field(default_factory=dict)
    """By window, see `visible`."""

    @property
    def own(self) -> tuple[int, int]:
        """The numbers of this process's chunks."""
        return owned(self.rank, self.size)

    @property
    def own_segments(self) -> list[int]:
        """The numbers of this process's segments."""
        return [number for number, segment in enumerate(self.segments) if segment.owner == self.rank]

    def in_order(self, every: Shaped[Tensor, "process chunk *shape"]) -> list[Tensor]:
        """What every process has of its two chunks, as a list by the number of the chunk."""
        return [every[chunk.owner, int(i >= self.size)] for i, chunk in enumerate(self.chunks)]

    def running_sums(self, step: Float[Tensor, "*rest token"]) -> Float[Tensor, "*rest token"]:
        """Float64 sums of each chunk, and of all before it."""
        sums = [float64_sums(step[..., own]) for own, _ in self.pieces]
        totals = self.in_order(gathered(torch.stack([own[..., -1] for own in sums]), self.group))
        before = list(accumulate(totals, initial=torch.zeros_like(totals[0])))
        return torch.cat([own + before[i][..., None] for own, i in zip(sums, self.own, strict=True)], -1)

    def before(
        self, numbers: Float[Tensor, "batch head token channel"], count: int
    ) -> list[Float[Tensor, "batch head earlier channel"]]:
        """From the last numbers of every chunk, which all processes get."""
        tails = [numbers[:, :, max(own.start, own.stop - count) : own.stop] for own, _ in self.pieces]
        padded = torch.stack([F.pad(tail, (0, 0, count - tail.shape[2], 0)) for tail in tails])
        every = self.in_order(gathered(padded, self.group))
        halos = []
        for number in self.own:
            parts: list[Tensor] = []
            missing = count
            for i in reversed(range(number)):
                taken = min(missing, self.chunks[i].count)
                parts.insert(0, every[i][:, :, count - taken :])
                missing -= taken
            halos.append(torch.cat(parts, 2) if parts else every[0][:, :, :0])
        return halos

    def visible(self, window: Window | None) -> list[slice]:
        """By the segment of queries, the slots of keys from the first to the last that may be seen.

        Padding between is not looked at. Slots are empty where nothing is seen.
        """
        if window not in self._visible:
            bands = (window,) if isinstance(window, Band) else window if isinstance(window, tuple) else ()
            begin, end, _ = Visibility(self.whole, window if isinstance(window, int) else None, bands).spans()
            end = end.where(end > begin, 0)
            ends = [(begin[:, s.slots].amin(), end[:, s.slots].amax()) for s in self.segments]
            # One value is read back, not one for each segment.
            spans = torch.stack([torch.stack(own) for own in ends]).tolist()
            self._visible[window] = [slice(*ends) if ends[0] < ends[1] else slice(0, 0) for ends in spans]
        return self._visible[window]
