"""Encodings by name: `ENCODINGS`, `make` and `register`."""

import difflib
from collections.abc import Mapping

from lengthwise.encodings.base import AttentionShape, Encoding
from lengthwise.encodings.composition import compose

ENCODINGS: dict[str, type[Encoding]] = {}
"""Every encoding by its name; `register` adds to it."""

RESERVED = "+,:."
"""What names of encodings cannot have: they join parts, layers, windows and the names of weights."""


def make(
    name: str,
    *,
    heads: int,
    width: int,
    head_dim: int | None = None,
    train_length: int = 1024,
    causal: bool = True,
    **options: object,
) -> Encoding:
    """An encoding for attention of this shape.

    >>> make("alibi", heads=12, width=768, train_length=512, slopes="interleaved").limit is None
    True

    width is that of the model, head_dim = width / heads if not given; options are the encoding's own keywords. Those
    of a composition go by part: make("rope+fox", ..., rope={"base": 500_000.0}).
    """
    if head_dim is None:
        if not isinstance(heads, int) or not isinstance(width, int) or heads < 1 or width % heads:
            raise ValueError(
                f"heads must be a positive int that divides the width, unless head_dim is given, got heads={heads!r} "
                f"and width={width!r}"
            )
        head_dim = width // heads
    return build(name, AttentionShape(heads, width, head_dim, train_length, causal), options)


def build(name: str, shape: AttentionShape, options: Mapping[str, object]) -> Encoding:
    """An encoding from its name, the shape of its attention and its own options."""
    return find(name).from_options(name, shape, options)


def find(name: str) -> type[Encoding]:
    """The class of an encoding, or of several joined by "+"; or an error that suggests the nearest name."""
    if isinstance(name, str) and name in ENCODINGS:
        return ENCODINGS[name]
    if isinstance(name, str) and "+" in name:
        parts = tuple(name.split("+"))
        return compose(parts, tuple(map(find, parts)))
    near = difflib.get_close_matches(str(name), ENCODINGS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown encoding {name!r}; {hint}Known: {', '.join(map(repr, ENCODINGS))}")


def is_encoding(name: str) -> bool:
    """Whether a name is that of an encoding, or of several joined by "+"."""
    return all(part in ENCODINGS for part in name.split("+"))


def register(name: str, encoding: type[Encoding]) -> type[Encoding]:
    """Make an encoding known by name to everything in Lengthwise: models, studies, and the laws."""
    if not isinstance(encoding, type) or not issubclass(encoding, Encoding):
        raise TypeError(f"an encoding must be a subclass of lengthwise.Encoding, got {encoding!r}")
    if not isinstance(name, str) or not name or set(name) & set(RESERVED):
        raise TypeError(f"an encoding's name must be a string without any of {RESERVED!r}, got {name!r}")
    if ENCODINGS.get(name, encoding) is not encoding:
        owner = ENCODINGS[name].__name__
        raise ValueError(f"a name must belong to one encoding, got {name!r}, which is {owner} already")
    if not hasattr(encoding, "paper"):
        raise TypeError(
            f"an encoding must name its `paper`, if only as 'unpublished', got {encoding.__name__}, which does not"
        )
    ENCODINGS[name] = encoding
    return encoding
