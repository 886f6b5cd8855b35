"""Confidence intervals: Student's t over seeds, bootstrap over documents, and differences on the same tokens.

A measured value is a ratio of sums over documents (nats over tokens, bits over bytes). One resampling draws as many
documents as there are, with replacement; the interval is where 95 of 100 resamplings fall. Models that were measured on
the same tokens are resampled together: what makes a text easy or hard for both cancels. One document says nothing of
others: its interval is not known. A few seeds are not resampled: their mean has an interval by Student's t.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lengthwise.errors import check_int

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The numerator and the denominator of a ratio, one number of each per document."""

ROUNDS = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """From low to high; both NaN where it is not known."""

    low: float
    high: float

    def text(self, form: Callable[[float], str]) -> str:
        """Both ends, or "-" where they are not known."""
        return "-" if math.isnan(self.low) else f"{form(self.low)} to {form(self.high)}"


UNKNOWN = Interval(math.nan, math.nan)


def bootstrap(sums: Sums, *, rounds: int = ROUNDS, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """The interval of a ratio of sums over documents."""
    if len(sums[0]) < 2:
        return UNKNOWN
    return _interval(_resampled(sums, rounds=rounds, seed=seed), confidence)


def wilson(successes: int, count: int) -> Interval:
    """Wilson's 95 % interval of a share.

    >>> low, high = wilson(0, 10)
    >>> round(low, 3), round(high, 3)
    (0.0, 0.278)
    """
    if not count:
        return UNKNOWN
    share, z = successes / count, 1.96
    middle, spread = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + (z / count) ** 2 / 4),
    )
    # In exact numbers both ends are shares; rounding must not take them out of 0 to 1.
    return Interval(*(min(1.0, max(0.0, (middle + side * spread) / (1 + z * z / count))) for side in (-1, 1)))


class Holds(NamedTuple):
    """The longest length to which a model holds, and where that lies in 95 of 100 resamplings of the documents."""

    length: int
    low: int
    high: int


def holds_to(by_length: Mapping[int, Sums], *, tolerance: float = 0.02, rounds: int = ROUNDS, seed: int = 0) -> Holds:
    """The longest length up to which no loss is more than `tolerance` above the best at a shorter one.

    All lengths on the same documents, which are resampled together.
    """
    lengths = sorted(by_length)
    values = np.array([[ratio_of_sums(by_length[length])] for length in lengths])
    resampled = np.stack([_resampled(by_length[length], rounds=rounds, seed=seed) for length in lengths])
    place, places = (_last_held(losses, tolerance) for losses in (values, resampled))
    low, high = np.quantile(places, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    return Holds(*(lengths[int(index)] for index in (place[0], low, high)))


def _last_held(losses: NDArray[np.float64], tolerance: float) -> NDArray[np.int64]:
    """For each column of losses by length, the last row up to which every one holds."""
    best = np.minimum.accumulate(losses, axis=0)[:-1]
    held = np.logical_and.accumulate(losses[1:] <= (1 + tolerance) * best, axis=0)
    return held.sum(axis=0)


def t_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The interval of a mean over a few independent values, by Student's t: resampling three of them says nothing.

    >>> low, high = t_interval([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval over seeds needs at least 2 values, got {count}")
    half = _t_quantile((1 + confidence) / 2, count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    mean = float(np.mean(values))
    return Interval(mean - half, mean + half)


def interval_words(counts: Iterable[int], *, single: str = "documents") -> str:
    """What the 95 % intervals of a table are over, by how many seeds each is of; none is of no interval.

    >>> interval_words([3, 3, 0])
    "by Student's t over 3 seeds"
    >>> interval_words([1]), interval_words([1, 3, 2])
    ('over documents', "by Student's t over 2 to 3 seeds, of one score over documents")
    """
    known = {count for count in counts if count}
    several = sorted(known - {1})
    if not several:
        return f"over {single}"
    numbers = " to ".join(map(str, dict.fromkeys([several[0], several[-1]])))
    return f"by Student's t over {numbers} seeds" + (f", of one score over {single}" if 1 in known else "")


@functools.cache
def _t_quantile(probability: float, freedom: int) -> float:
    """Where Student's distribution reaches a probability above a half: its density integrated over an angle.

    With x = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), which has no tail.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(2 * probability - 1, area / area[-1], angles)
    return math.sqrt(freedom) * math.tan(float(angle))


def paired_difference(
    first: Sums, second: Sums, *, rounds: int = ROUNDS, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, Interval]:
    """How much higher the first model's ratio is than the second's on the same documents, and its interval."""
    sizes = {len(part) for sums in (first, second) for part in sums}
    if len(sizes) != 1 or not np.array_equal(first[1], second[1]):
        raise ValueError(
            "a paired difference needs the same scored tokens in both, got other documents or counts; measure both "
            "with the same text, lengths and protocol"
        )
    difference = ratio_of_sums(first) - ratio_of_sums(second)
    if sizes == {1}:
        return difference, UNKNOWN
    # The same seed draws the same documents for both.
    resampled = _resampled(first, rounds=rounds, seed=seed) - _resampled(second, rounds=rounds, seed=seed)
    return difference, _interval(resampled, confidence)


def ratio_of_sums(sums: Sums) -> float:
    """The value that sums over documents make."""
    return float(sums[0].sum() / sums[1].sum())


def added(seeds: Sequence[Sums]) -> Sums:
    """The sums of several seeds on the same tokens together: their ratio is the mean of each one's."""
    above, below = (np.sum(part, axis=0) for part in zip(*seeds, strict=True))
    return above, below


def _resampled(sums: Sums, *, rounds: int, seed: int) -> NDArray[np.float64]:
    """One ratio per round."""
    check_int("rounds", rounds)
    documents = len(sums[0])
    drawn = np.random.default_rng([seed, 0]).multinomial(documents, np.full(documents, 1 / documents), size=rounds)
    above, below = (drawn @ part for part in sums)
    # A resampling may miss every document that has scored tokens when there are very few.
    ratios: NDArray[np.float64] = above / np.where(below > 0, below, np.nan)
    return ratios


def _interval(resampled: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.nanquantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))
