"""The workbench for positional encodings of transformers: use, train, measure and see them."""

from lengthwise.attention import attend, explain
from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, LevelBias
from lengthwise.encodings import ENCODINGS, Encoding, Geometry, PositionError, make, register

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
    "PositionError",
    "attend",
    "explain",
    "make",
    "register",
]
