"""What the witness tests share: scenes to ask an encoding about, and a comparison that derives its tolerance."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import lengthwise as lw
from lengthwise.errors import OptionError

HEADS, WIDTH, BATCH = 7, 21, 3


def make(name, *, heads=HEADS, width=WIDTH, head_dim=None, seed=0, **options):
    """An encoding in float64 whose parameters are large and of both signs, so that no fault can hide."""
    torch.manual_seed(seed)
    encoding = lw.make(name, heads=heads, width=width, head_dim=head_dim, **options).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
            if parameter.numel() == 1:  # FIRE takes the absolute value of these
                parameter.copy_(-parameter.abs())
    return encoding


@dataclass(frozen=True)
class Scene:
    """Where queries and keys stand, one list of positions per sequence, and which keys are padding.

    The queries are the last slots. A single list of positions holds for all sequences.
    """

    query: list[list[int]]
    key: list[list[int]]
    padding: tuple[int, ...] = (0,) * BATCH

    @property
    def queries(self) -> int:
        return len(self.query[0])

    @property
    def keys(self) -> int:
        return len(self.key[0])

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return torch.randn(BATCH, self.keys, WIDTH, dtype=torch.float64, generator=generator)

    def key_mask(self) -> Tensor:
        return torch.arange(self.keys) >= torch.tensor(self.padding)[:, None]

    def bias(self, encoding, *, with_state: bool):
        """Asked as a cached decoder asks, new tokens and the state of all; or with all tokens and no state."""
        x, causal = self.tokens(), encoding.shape.causal
        layout = lw.TokenLayout.of(torch.tensor(self.query), torch.tensor(self.key), causal=causal)
        if with_state:
            return encoding.bias(x[:, -self.queries :], layout, encoding.state(x, self.key_mask()))
        return encoding.bias(x, layout)

    def at(self, b: int, i: int, j: int) -> tuple[int, int]:
        """The positions of query i and key j."""
        return self.query[b % len(self.query)][i], self.key[b % len(self.key)][j]

    def last(self, b: int, i: int) -> int:
        """The last position of query i's document: where positions stop rising, another begins."""
        positions = self.query[b % len(self.query)]
        while i + 1 < len(positions) and positions[i + 1] > positions[i]:
            i += 1
        return positions[i]

    def pairs(self, *, causal: bool):
        """Every b, i, j that may meet: not padding, of one document, and in order if that matters."""
        for b, i, j in itertools.product(range(BATCH), range(self.queries), range(self.keys)):
            slot = self.keys - self.queries + i
            key = self.key[b % len(self.key)]
            one_document = all(key[s] < key[s + 1] for s in range(min(slot, j), max(slot, j)))
            if one_document and j >= self.padding[b] and (j <= slot or not causal):
                yield b, i, j


def _rising(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


_GAPS = [[0, 1, 5, 6, 17, 30, 31, 62, 127, 128, 129, 150, 201], [3, 4, 8, 9, 10, 12, 14, 20, 21, 22, 23, 24, 37]]

SCENES = {
    "one row of positions for all sequences": Scene([_rising(0, 19)], [_rising(0, 19)]),
    "a row for each sequence": Scene(rows := [_rising(start, 13) for start in (0, 4, 9)], rows),
    "positions with gaps": Scene(gaps := [*_GAPS, _rising(0, 13)], gaps),
    "two packed documents": Scene([_rising(0, 5) + _rising(0, 8)], [_rising(0, 5) + _rising(0, 8)]),
    "one new token": Scene([[16]], [_rising(0, 17)]),
    "five new tokens after left padding": Scene(
        [_rising(6, 5), _rising(3, 5), _rising(1, 5)],
        [_rising(0, 11), _rising(-3, 11), _rising(-5, 11)],
        padding=(0, 3, 5),
    ),
}


def numbers(tensor: Tensor):
    """A tensor as nested lists of Python floats."""
    return tensor.detach().double().tolist()


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def assert_same(got: Tensor, expected: Tensor, *, roundings: float, scale: Tensor | float = 0.0) -> None:
    """Equal but for so many roundings in got's precision, each of a number as large as `scale` or the result."""
    unit = torch.finfo(got.dtype).eps
    allowed = roundings * unit * torch.maximum(expected.double().abs(), torch.as_tensor(scale).double())
    excess = (got.double() - expected.double()).abs() - allowed
    assert got.shape == expected.shape
    assert (excess <= 0).all(), f"off by {excess.max():.3g} more than {roundings} roundings"


def assert_refuses(call: Callable[[], object], error: type | tuple[type, ...], *phrases: str) -> None:
    """Raises this error, in our own code, and the message says what was expected and what was got."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert type(raised.value) in (ValueError, TypeError, NotImplementedError, lw.PositionError, OptionError)
    assert "lengthwise" in str(raised.traceback[-1].path), f"not our own words: {message}"
    assert re.search(r"\bgot\b|unknown|known:|cannot take", message), f"it does not say what it got: {message}"
    assert not re.search(r"\bcame\b", message), f"not in plain words: {message}"
    for phrase in phrases:
        assert phrase in message
