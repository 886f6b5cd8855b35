"""A way to stretch from how it is written: a method of bands with its numbers, or a scaling of angles."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

from lengthwise.encodings._rope_scaling import SCALINGS
from lengthwise.errors import OptionError, describe
from lengthwise.model.stretch.bands import METHODS, Method

LOG_N = "logn"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3's own, for "llama3:8"."""
LARGEST_NUMBER = 2**24
"""Of the numbers in a way to stretch: up to here float32 tells one position from the next."""


@dataclass(frozen=True)
class StretchSpec:
    """A way to stretch, read and checked as far as it can be without a model."""

    label: str
    """As it is written: "self-extend:8"."""
    method: type[Method] | None = None
    numbers: tuple[int, ...] = ()
    scaling: Mapping[str, object] | None = None
    logn: bool = False

    def bands(self, train_length: int) -> Method | None:
        """The method for a trained length."""
        return None if self.method is None else self.method(train_length, *self.numbers)


def parse_stretch(spec: "str | Mapping[str, object] | StretchSpec") -> StretchSpec:
    """A way to stretch from its name, or a scaling from the mapping that has all its numbers.

    >>> parse_stretch("yarn:8").scaling
    {'type': 'yarn', 'factor': 8.0}
    """
    if isinstance(spec, StretchSpec):
        return spec
    if isinstance(spec, Mapping):
        kind, factor = spec.get("type", spec.get("rope_type")), spec.get("factor")
        if not isinstance(factor, int | float):
            return StretchSpec(str(kind), scaling=dict(spec))  # a rule without one, or refused by the rule
        _check_factor(factor, f"{kind}:{factor:g}")
        return StretchSpec(f"{kind}:{factor:g}", scaling=dict(spec))
    if not isinstance(spec, str):
        raise OptionError(f"a stretching method must be written such as 'self-extend:8', got {describe(spec)}")
    first, *more = [word.strip() for word in spec.split("+")]
    if more not in ([], [LOG_N]) or (first == LOG_N and more):
        raise OptionError(f"after a stretching method there can be '+{LOG_N}' and nothing else, got {spec!r}")
    if first == LOG_N:
        return StretchSpec(spec, logn=True)
    name, *words = first.split(":")
    logn = bool(more)
    if name in METHODS:
        return StretchSpec(spec, METHODS[name], _numbers(METHODS[name], words, first), logn=logn)
    if name in SCALINGS and name != "default":
        return StretchSpec(spec, scaling=_scaling(name, words, first), logn=logn)
    known = [*METHODS, *(kind for kind in SCALINGS if kind != "default"), LOG_N]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    raise OptionError(f"unknown stretching method {name!r}; {hint}: {', '.join(known)}")


def _numbers(method: type[Method], words: Sequence[str], spec: str) -> tuple[int, ...]:
    own = [field for field in fields(method) if field.name != "train_length"]
    needed = sum(field.default is MISSING for field in own)
    if not needed <= len(words) <= len(own) or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"it must be written {method.usage}, with positive whole numbers, got {spec!r}")
    numbers = tuple(int(word) for word in words)
    if max(numbers, default=0) > LARGEST_NUMBER:
        raise OptionError(f"the numbers of a stretching method must be at most {LARGEST_NUMBER:,}, got {spec!r}")
    return numbers


def _scaling(name: str, words: Sequence[str], spec: str) -> dict[str, object]:
    try:
        (factor,) = map(float, words)
    except ValueError:
        raise OptionError(f"a scaling must be written TYPE:FACTOR, such as 'yarn:8', got {spec!r}") from None
    _check_factor(factor, spec)
    return {"type": name, "factor": factor, **(LLAMA3 if name == "llama3" else {})}


def _check_factor(factor: float, spec: str) -> None:
    if not 1 <= factor <= LARGEST_NUMBER:  # nor is NaN
        raise OptionError(f"a stretching factor must be a number from 1 to {LARGEST_NUMBER:,}, got {spec!r}")
