"""The workbench for positional encodings of transformers: use, train, measure and see them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lengthwise.attention import attend, checked_call, explain
    from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, LevelBias, LineBias, registered_tile
    from lengthwise.encodings import ENCODINGS, Encoding, Geometry, PositionError, checked_positions, make, register

__version__ = "0.1.0"

__all__ = [
    "ENCODINGS",
    "Bias",
    "DenseBias",
    "DistanceBias",
    "Encoding",
    "FunctionBias",
    "Geometry",
    "LevelBias",
    "LineBias",
    "PositionError",
    "attend",
    "checked_call",
    "checked_positions",
    "explain",
    "make",
    "register",
    "registered_tile",
]

_ROOMS = ("encodings", "attention", "bias")


def __getattr__(name: str) -> object:
    """Find a public name where it lives; torch is loaded with the first one, so that `lengthwise --help` need not."""
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"lengthwise.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
