"""The workbench for positional encodings of transformers: use, train, measure and see them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lengthwise.attention import attend, explain, merge, skipping
    from lengthwise.bias import (
        Bias,
        DenseBias,
        DistanceBias,
        FunctionBias,
        LevelBias,
        LineBias,
        QueryDistanceBias,
        SumBias,
        registered,
    )
    from lengthwise.encodings import ENCODINGS, AttentionShape, Encoding, make, register
    from lengthwise.model.accelerate import accelerate
    from lengthwise.model.adapters import load, save_adapter
    from lengthwise.model.fit import fit, unfit
    from lengthwise.model.stretch import stretch, unstretch
    from lengthwise.rescore import ContextualPositions, HeadNetwork, Rescore, ScoreFunction
    from lengthwise.token_layout import Band, PositionError, TokenLayout, layout

__version__ = "0.1.0"

_HOMES = {
    "AttentionShape": "encodings",
    "ENCODINGS": "encodings",
    "Band": "token_layout",
    "Bias": "bias",
    "ContextualPositions": "rescore",
    "DenseBias": "bias",
    "DistanceBias": "bias",
    "Encoding": "encodings",
    "FunctionBias": "bias",
    "HeadNetwork": "rescore",
    "LevelBias": "bias",
    "LineBias": "bias",
    "PositionError": "token_layout",
    "QueryDistanceBias": "bias",
    "Rescore": "rescore",
    "ScoreFunction": "rescore",
    "SumBias": "bias",
    "TokenLayout": "token_layout",
    "accelerate": "model.accelerate",
    "attend": "attention",
    "explain": "attention",
    "fit": "model.fit",
    "layout": "token_layout",
    "load": "model.adapters",
    "make": "encodings",
    "merge": "attention",
    "register": "encodings",
    "registered": "bias",
    "save_adapter": "model.adapters",
    "skipping": "attention",
    "stretch": "model.stretch",
    "unfit": "model.fit",
    "unstretch": "model.stretch",
}
"""Where each public name lives. torch is loaded with the first one, so that `lengthwise --help` need not."""

__all__ = [
    "ENCODINGS",
    "AttentionShape",
    "Band",
    "Bias",
    "ContextualPositions",
    "DenseBias",
    "DistanceBias",
    "Encoding",
    "FunctionBias",
    "HeadNetwork",
    "LevelBias",
    "LineBias",
    "PositionError",
    "QueryDistanceBias",
    "Rescore",
    "ScoreFunction",
    "SumBias",
    "TokenLayout",
    "accelerate",
    "attend",
    "explain",
    "fit",
    "layout",
    "load",
    "make",
    "merge",
    "register",
    "registered",
    "save_adapter",
    "skipping",
    "stretch",
    "unfit",
    "unstretch",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"lengthwise.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
