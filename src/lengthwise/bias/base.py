"""What every kind of bias has: a shape, tiles, and what bounds it from above."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.bias.description import Description

Index = slice | Int[Tensor, " index"]
"""Some rows or columns of a bias: whatever picks from one axis of a tensor."""

ALL = slice(None)

B = TypeVar("B", bound="Bias")

Axes = Mapping[Literal["head", "query", "key"], int]
"""Which axis of a tensor runs over heads, queries or keys."""


class Bias(Description, ABC):
    """What is added to the scores of one call of attention."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, head or 1, query, key)."""

    @abstractmethod
    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "#batch #head row column"]:
        """A part of the matrix, in float32 or better."""

    def dense(self) -> Float[Tensor, "#batch #head query key"]:
        """The whole matrix, slow and large on purpose: the definition, for tests and pictures."""
        return self.tile(ALL, ALL)

    def positions(self) -> tuple[Tensor, Tensor] | None:
        """The positions of queries and keys that it was made for, if it holds them."""
        return None

    @property
    def is_compact(self) -> bool:
        """Whether a file can hold it in less room than its matrix."""
        return True

    @property
    def is_uniform(self) -> bool:
        """Whether it is seen to depend on distance alone; False where it does not, or that is hard to see."""
        return False

    def axes(self) -> dict[str, Axes]:
        """By the name of a tensor which of its axes runs over heads, queries or keys; one of 1 is for all of them.

        With these a bias of some queries and keys is put together from those of others.
        """
        return dict(self._axes)

    def key_peaks(self, width: int, count: int) -> dict[str, Tensor] | None:
        """What bounds the bias of `count` blocks of `width` keys from above, by name; None where nothing does.

        The last axis of each runs over the blocks; those behind the last key are bounded by -inf.
        """
        return None

    def ceiling(self, peaks: Mapping[str, Tensor]) -> Float[Tensor, "#batch #head query block"]:
        """The largest bias that each query can have in blocks of keys with these peaks, if none comes after it."""
        raise NotImplementedError(f"a {type(self).__name__} has no bound")

    def first_sequence(self: B) -> B:
        """That of the first sequence alone, detached and on the CPU: for maps and files."""
        own = {name: x.detach()[:1] if name in self._by_sequence else x.detach() for name, x in self.tensors().items()}
        return self.rebuilt({name: x.cpu() for name, x in own.items()})

    _by_sequence: ClassVar[tuple[str, ...]] = ()
    """The tensors whose first axis is the batch."""
    _axes: ClassVar[Mapping[str, Axes]] = {}
    """`axes` of a kind whose tensors always have the same."""


LEAST_FALL = 87.0
"""From so much on, in nats, float32 has no whole precision left for a weight."""


def block_peaks(x: Tensor, width: int, count: int) -> Tensor:
    """The largest of each of `count` blocks along the last axis; where there is nothing, the least there can be."""
    least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min // 2
    filled = torch.nn.functional.pad(x.detach(), (0, width * count - x.shape[-1]), value=least)
    return filled.unflatten(-1, (count, width)).amax(-1)
