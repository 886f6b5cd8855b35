"""Tables that a decoder would make again at every token, cached for as long as they would come out the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lengthwise.bias import DistanceBias, FunctionBias, Index
from lengthwise.encodings.base import check_sides
from lengthwise.token_layout import TokenLayout

T = TypeVar("T")

STEP = 512
"""A cached table is as long as the next multiple of this, so that it serves the tokens to come as well."""


class TableCache:
    """The last table that was made, beside copies of the numbers it was made of."""

    def __init__(self) -> None:
        self._last: tuple[int, list[Tensor], Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableCache":
        """Empty: a copy of an encoding may be changed in what the table is made of."""
        return TableCache()

    def table(self, make: Callable[[int], T], reach: int, *made_of: Tensor, decoding: bool) -> T:
        """make(n) with n >= reach, or what it gave last if that reaches and nothing that it was made of has changed.

        Numbers are compared, not versions, which writing to `.data` would not change. Where a gradient may be wanted,
        in one pass over all tokens, and on a device, which would have to be waited for, it is made anew and no longer
        than needed.
        """
        on_device = any(not x.is_cpu for x in made_of)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not decoding or on_device:
            return make(reach)
        last = self._last
        if last is None or last[0] < reach or not all(map(_same, last[1], made_of)):
            longer = -(-reach // STEP) * STEP
            self._last = last = longer, [x.detach().clone() for x in made_of], make(longer)
        table: T = last[2]
        return table


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def table_reach(layout: TokenLayout) -> int | None:
    """How many distances a table needs, from 0 on; None if positions have such gaps that a table would be wasteful.

    Of a sequence that processes share, all tokens count: distances reach from one process to another. Where the
    positions may not be read, a graph or a device assumes that they follow the slots, and stops at run time if they do
    not.
    """
    layout = layout.whole
    if layout.query.ndim != 2:
        raise ValueError(
            f"a table of distances needs positions (batch, position), got shape {tuple(layout.query.shape)}; rows and "
            "columns are for 'swin' and 'alibi-2d'"
        )
    count = max(layout.query_count, layout.key_count)
    if layout.facts is not None:
        return max(layout.facts.furthest + 1, 1) if layout.facts.furthest < max(4 * count, STEP) else None
    if layout.query.numel() and layout.key.numel():
        (first, last), (lowest, highest) = layout.query.aminmax(), layout.key.aminmax()
        furthest = torch.maximum(last - lowest, highest - first)
        torch._assert_async(furthest < count, "positions with gaps need a longer table than a graph or a device has")
    return count


def is_decoding(layout: TokenLayout) -> bool:
    """Whether cached keys come before the queries."""
    return layout.query_count != layout.key_count


def bias_of_distance(
    cache: TableCache,
    function: Callable[..., Tensor],
    numbers: Callable[[], tuple[Tensor, ...]],
    layout: TokenLayout,
    *made_of: Tensor,
    causal: bool,
) -> DistanceBias | FunctionBias:
    """A table with one number per distance, or the function itself where positions have gaps.

    `function` is a registered one of rows, columns, query and key positions and the numbers, which are made of the
    learned parameters `made_of`; heads are the second axis of what it gives.
    """
    check_sides(layout, causal=causal)
    reach = table_reach(layout)
    if reach is None:
        return FunctionBias(function, (layout.query, layout.key, *numbers()))

    def make(reach: int) -> tuple[Tensor, int]:
        first = 0 if causal else 1 - reach
        distances = torch.arange(first, reach, device=layout.query.device)[None]
        origin = torch.zeros_like(distances[:, :1])
        return function(slice(None), slice(None), distances, origin, *numbers())[0, :, :, 0], first

    # Nothing that is learned, but on the device of the table.
    place = layout.query.new_empty(0)
    table, first = cache.table(make, reach, *made_of, place, decoding=is_decoding(layout))
    return DistanceBias(table, layout.query, layout.key, first)


def by_side(
    function: Callable[..., Tensor], rows: Index, columns: Index, query: Tensor, key: Tensor, *numbers: Tensor
) -> Tensor:
    """A function of distance whose numbers, (head, 2), are those of the key's side: before the query, or after it."""
    before, after = (function(rows, columns, query, key, *(number[:, side] for number in numbers)) for side in (0, 1))
    return torch.where(query[:, None, rows, None] < key[:, None, None, columns], after, before)
