"""Tables that a decoder would make again at every token, kept for as long as they would come out the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

ROOM = 512
"""A kept table is as long as the next multiple of this, so that it serves the tokens to come as well."""


class Kept:
    """The last thing that was made, beside copies of the numbers it was made of."""

    def __init__(self) -> None:
        self._last: tuple[int, list[Tensor], Any] | None = None

    def table(self, make: Callable[[int], T], reach: int, queries: int, *made_of: Tensor) -> T:
        """make(n) with n >= reach, or what it gave last if that reaches and nothing that it was made of has changed.

        Numbers are compared, not versions, which writing to `.data` would not change. Where a gradient may be wanted,
        and in one pass over all tokens, it is made anew and no longer than needed.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or queries == reach:
            return make(reach)
        last = self._last
        if last is None or last[0] < reach or not all(map(_same, last[1], made_of)):
            longer = -(-reach // ROOM) * ROOM
            self._last = last = longer, [x.detach().clone() for x in made_of], make(longer)
        found: T = last[2]
        return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
