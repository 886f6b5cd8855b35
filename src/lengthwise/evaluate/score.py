"""The losses of one model at one length, as sums by document: what is written to files, compared and tabled."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.evaluate.statistics import Interval, bootstrap


@dataclass(frozen=True)
class Score:
    """The losses of one model on the scored tokens of one length, as sums by document.

    These sums are enough for the perplexity, the bits per byte, their intervals, and the difference from another model
    on the same tokens; so a score that was written to a file can be compared with one that is measured today.
    """

    name: str
    length: int
    protocol: str
    """The protocol as a sentence."""
    source: str
    """The text that was used."""
    tokenizer: str
    """The same for models whose perplexities can be compared."""
    targets: str = ""
    """A checksum of the scored tokens and their places: the same means that a paired difference is one."""
    documents: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    positions: list[tuple[int, float]] = field(default_factory=list)
    """The mean loss by place in the window: the last place of each of up to 64 groups, and its loss."""
    seconds: float = 0.0
    refused: str | None = None
    """Why there is no measurement, if there is none."""

    @property
    def scored(self) -> int:
        """How many tokens were scored."""
        return sum(self.tokens)

    @property
    def loss(self) -> float:
        """The mean of -log p over the scored tokens."""
        return sum(self.nats) / self.scored if self.scored else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """What the scored text costs per byte: comparable whatever the tokenizer."""
        return sum(self.nats) / sum(self.bytes) / math.log(2) if sum(self.bytes) else math.nan

    def sums(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """By document: nats and tokens, or bits and bytes."""
        nats = np.array(self.nats)
        if metric == "perplexity":
            return nats, np.array(self.tokens, dtype=float)
        return nats / math.log(2), np.array(self.bytes, dtype=float)

    def interval(self, metric: str = "perplexity") -> Interval:
        """Where the value lies in 95 of 100 resamplings of the documents."""
        interval = bootstrap(self.sums(metric))
        return Interval(*map(_exp, interval)) if metric == "perplexity" else interval

    def as_json(self) -> dict[str, Any]:
        """All of it, and the values made of it; a file with this is read back by `from_json`."""
        values = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, "scored": self.scored}
        return asdict(self) | ({} if self.refused else values | {"interval": list(self.interval())})

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Score":
        """The score that `as_json` wrote."""
        fields = {key: value for key, value in content.items() if key in Score.__dataclass_fields__}
        return Score(**(fields | {"positions": [(int(p), float(v)) for p, v in fields["positions"]]}))


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
