"""What every route into a model offers."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from lengthwise.bias import LevelBias, at_least_float32
from lengthwise.inspect.record import Record

See = Callable[[Record, str], None]
"""What is done with a layer's record, and the part of the model that it is of."""

Wanted = Callable[[int, str], bool]
"""Whether a layer of a part is to be recorded."""


@dataclass(frozen=True)
class Route:
    """The way into one model; `depths` are its layers by part, "" where there is only one."""

    encoding: str
    depths: Mapping[str, int]
    watch: Callable[[nn.Module, See, Wanted], AbstractContextManager[None]]
    limit: int | None = None
    """How many tokens it takes, where its positions have an end."""
    in_path: bool = False
    """Whether something of ours stands in the model's path: an unwatched run must then give the same output."""


def rising(levels: Tensor, queries: int) -> LevelBias:
    """What families with ALiBi add, key_number[j], less key_number[i]: the same to a softmax, and 0 on the diagonal.

    The numbers are taken as the model has them, rounded as it rounds them.
    """
    if (levels == levels[:1]).all():
        levels = levels[:1]
    one, levels = at_least_float32(levels.new_ones(1, 1, 1)), levels.double()
    return LevelBias(levels[..., levels.shape[-1] - queries :], levels, one)
