"""Training: `train(TrainConfig(...))` gives a Run. The loop is in loop.py, top to bottom."""

from typing import TYPE_CHECKING, Any

from lengthwise.train.config import RECIPES, Recipe, TrainConfig

if TYPE_CHECKING:
    from lengthwise.train.loop import train

__all__ = ["RECIPES", "Recipe", "TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    """Load the loop, and torch with it, only when it is used: the command line needs only the config for --help."""
    if name == "train":
        from lengthwise.train.loop import train

        return train
    raise AttributeError(f"module 'lengthwise.train' has no attribute {name!r}")
