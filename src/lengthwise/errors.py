"""Checks at the public doors. An error says what was expected, what was got and, where it helps, what to do."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["floating-point", "integer", "bool"]
LARGEST = sys.float_info.max


class UserError(Exception):
    """What was asked for cannot be had, and the message says what can: a command prints it as one line."""


def how_to_install(extra: str) -> str:
    """The command for an extra, such as "lab"; Lengthwise is on no package index, so a clone is needed."""
    return f"in a clone of Lengthwise: pip install '.[{extra}]'"


class OptionError(UserError, TypeError, ValueError):
    """An encoding does not take these options. Both kinds, since Python calls an unknown keyword a TypeError."""


def describe(value: object) -> str:
    """A value in as few words as tell it apart."""
    from torch import Tensor  # late, here and below: a command that shows its help need not wait for torch

    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return f"{'an' if type(value).__name__[0] in 'AEIOUaeiou' else 'a'} {type(value).__name__}"


def check_int(name: str, value: object, advice: str = "", least: int = 1) -> None:
    """An int, `least` or more."""
    import torch

    # In an exported graph an int may be a symbol.
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < least:
        kind = "a positive int" if least == 1 else f"an int, {least} or more"
        raise ValueError(_message(f"{name} must be {kind}, got {describe(value)}", advice))


def check_number(name: str, value: object, advice: str = "", most: float = LARGEST) -> None:
    """A finite number above 0, up to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        limit = "" if most == LARGEST else f" and at most {most:g}"
        raise ValueError(_message(f"{name} must be a number above 0{limit}, got {describe(value)}", advice))


def check_flag(name: str, value: object, advice: str = "") -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(_message(f"{name} must be True or False, got {describe(value)}", advice))


def check_choice(name: str, value: object, choices: Sequence[str], advice: str = "") -> None:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(_message(f"{name} must be {' or '.join(map(repr, choices))}, got {describe(value)}", advice))


def check_tensor(
    name: str, value: object, axes: Sequence[str | int], kind: Kind, advice: str = "", *, more_axes: bool = False
) -> None:
    """A tensor of one kind whose axes are these: a number is that size, a name any."""
    from torch import Tensor

    if not isinstance(value, Tensor) or kind_of(value) != kind:
        got = value.dtype if isinstance(value, Tensor) else describe(value)
        raise TypeError(_message(f"{name} must be {'an' if kind[0] == 'i' else 'a'} {kind} tensor, got {got}", advice))
    shape = value.shape
    counted = len(shape) >= len(axes) if more_axes else len(shape) == len(axes)
    if not counted or any(a != n for a, n in zip(axes, shape, strict=False) if not isinstance(a, str)):
        wanted = f"({', '.join(map(str, axes))})"
        raise ValueError(_message(f"{name} must be {wanted}, got shape {tuple(shape)}", advice))


def check_broadcast(names: str, sizes: Sequence[int], what: str, advice: str = "") -> None:
    """Sizes that are equal, or 1 to be spread."""
    # Compared in turn and not as a set: in an exported graph a size may be a symbol, which has no hash.
    full = [size for size in sizes if size != 1]
    if any(size != full[0] for size in full[1:]):
        got = " and ".join(map(str, sizes))
        raise ValueError(_message(f"{names} must agree in {what}, or have 1, got {got}", advice))


def kind_of(tensor: "Tensor") -> str:
    """Whether it holds floating-point numbers, integers, booleans or complex numbers."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        return "floating-point"
    if dtype.is_complex:
        return "complex"
    return "bool" if str(dtype) == "torch.bool" else "integer"


def _message(fact: str, advice: str) -> str:
    return f"{fact}. {advice}" if advice else fact
