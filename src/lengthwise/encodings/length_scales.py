"""Factors on the scores that grow with length and are not learned: one class a rule. n keys are seen by the query.

    logn               max(1, log n / log L)                          Su 2021, kexue.fm/8823; L the training length
    llama4-scale       1 + strength log(1 + floor(n / floor))         Llama 4, in its layers without positions
    ministral3-scale   1 + strength log(1 + floor((n - 1) / floor))   Ministral 3, Mistral 4: one token later
    log-floor          1 + strength log(max(n / floor, 1))            Inkling, in its full layers

n is the number of a token in its own document, its position + 1. The models multiply their queries; here the factor is
on content and bias alike, which differs only beside a bias, and there Inkling does as we do.
"""

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import has_float64
from lengthwise.encodings.base import AttentionShape, Encoding, Tokens
from lengthwise.errors import check_int, check_number
from lengthwise.token_layout import TokenLayout, Window
from lengthwise.visibility import visible_counts


class _LengthScale(Encoding):
    """A factor that every head shares."""

    by_head = ()
    symmetric = True

    def logit_scale(
        self, x: Tokens, layout: TokenLayout, *, window: Window | None = None
    ) -> Float[Tensor, "#batch #head query"]:
        """The rule's factor, in float32."""
        seen = visible_counts(layout)
        return self.factor(seen.double() if has_float64(seen.device) else seen.float()).float()

    @abstractmethod
    def factor(self, seen: Tensor) -> Tensor:
        """The factor of a query that sees so many keys."""


class LogN(_LengthScale):
    """1 up to the training length, then in step with the logarithm of the length."""

    paper = "Su 2021, kexue.fm/8823"

    def factor(self, seen: Tensor) -> Tensor:
        """max(1, log n / log L)."""
        length = seen.new_tensor(max(self.shape.train_length, 2))
        return (seen.log() / length.log()).clamp(min=1)


class _Floored(_LengthScale):
    """A rule with a strength and a length, `floor`, up to which it is 1."""

    default_floor: int | None = None
    """The model's own; None for the training length."""

    def __init__(self, shape: AttentionShape, *, strength: float = 0.1, floor: int | None = None) -> None:
        super().__init__(shape)
        check_number("strength", strength, "The models have 0.1.")
        if floor is None:
            floor = self.default_floor or shape.train_length
        check_int("floor", floor, "Leave it out for the model's own.")
        self.strength, self.floor = strength, floor


class Llama4Scale(_Floored):
    """A step up at every multiple of 8,192 tokens."""

    paper = "Meta 2025 (Llama 4)"
    default_floor = 8192

    def factor(self, seen: Tensor) -> Tensor:
        """1 + strength log(1 + floor(n / floor))."""
        return 1 + self.strength * (seen / self.floor).floor().log1p()


class Ministral3Scale(_Floored):
    """Llama 4's steps, each one token later, every 16,384."""

    paper = "Mistral AI 2025 (Ministral 3)"
    default_floor = 16384

    def factor(self, seen: Tensor) -> Tensor:
        """1 + strength log(1 + floor((n - 1) / floor))."""
        return 1 + self.strength * ((seen - 1) / self.floor).floor().log1p()


class LogFloor(_Floored):
    """A smooth rise from the training length on."""

    paper = "Thinking Machines 2026, the model Inkling"

    def factor(self, seen: Tensor) -> Tensor:
        """1 + strength log(max(n / floor, 1))."""
        return 1 + self.strength * (seen / self.floor).clamp(min=1).log()
