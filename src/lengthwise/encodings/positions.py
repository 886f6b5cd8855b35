"""Where tokens stand: what the positions of one call's queries and keys must be, and how far they reach."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.checks import check_broadcast, check_tensor

Positions = Int[Tensor, "#batch position"]
"""Where tokens stand, counted from 0: one row for all sequences or one for each."""


class PositionError(ValueError):
    """A position that an encoding has no answer for."""


@dataclass
class _Pair:
    """Positions that were looked at: all layers of a model ask about the same."""

    given: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    checked: tuple[Positions, Positions]
    query_ends: tuple[int, int]
    """The lowest and the highest of the queries."""
    furthest: int | None = None
    """Their greatest distance, once somebody has asked."""

    def is_of(self, query: Tensor, key: Tensor) -> bool:
        """Whether these are the same two tensors, unchanged."""
        return query is self.given[0] and key is self.given[1] and self.versions == (query._version, key._version)


_last: _Pair | None = None


def checked_positions(
    query: Int[Tensor, "*batch query"], key: Int[Tensor, "*batch key"]
) -> tuple[Positions, Positions]:
    """Positions as (batch or 1, position) each, or an error. A key may be negative (padding), a query may not."""
    global _last
    eager, last = not torch.compiler.is_compiling(), _last
    if eager and last is not None and last.is_of(query, key):
        return last.checked
    checked = _two_axes("query positions", query), _two_axes("key positions", key)
    sizes = [positions.shape[0] for positions in checked]
    check_broadcast("query and key positions", sizes, "batch", "Give one row or one each.")
    if eager and query.numel():
        ends = _ends(query)
        if ends[0] < 0:
            raise PositionError(
                f"a query's position must be 0 or more; {ends[0]} came. Give padding position 0 and mask it."
            )
        if query.is_inference() or key.is_inference():  # those have no version
            _last = None
        else:
            _last = _Pair((query, key), (query._version, key._version), checked, ends)
    return checked


def _two_axes(name: str, positions: Int[Tensor, "*batch position"]) -> Positions:
    if isinstance(positions, Tensor) and positions.ndim == 1:
        positions = positions[None]
    check_tensor(name, positions, ("batch", "position"), "integer", "Use torch.arange(length).")
    return positions


def reaches_beyond(query: Positions, key: Positions, reach: int) -> bool:
    """Whether some distance between checked positions is `reach` or more either way, as those with gaps can be.

    In eager mode this reads the positions. A compiled graph cannot branch on them: it assumes that there are no such
    distances, and stops at run time if there are.
    """
    if query.numel() == 0 or key.numel() == 0:
        return False
    if torch.compiler.is_compiling():
        (first, last), (lowest, highest) = query.aminmax(), key.aminmax()
        furthest = torch.maximum(last - lowest, highest - first)
        torch._assert_async(furthest < reach, "positions with gaps need a longer table than a compiled graph has")
        return False
    pair = _last
    if pair is None or query is not pair.checked[0] or key is not pair.checked[1]:
        return _furthest(query, key) >= reach
    if pair.furthest is None:
        pair.furthest = _furthest(query, key)
    return pair.furthest >= reach


def highest(positions: Positions) -> int:
    """The highest of some positions, -1 if there are none; remembered for those that were looked at last."""
    if _last is not None and positions is _last.checked[0]:
        return _last.query_ends[1]
    return int(positions.max()) if positions.numel() else -1


def _furthest(query: Positions, key: Positions) -> int:
    """The greatest distance either way."""
    (first, last), (front, back) = _ends(query), _ends(key)
    return max(last - front, back - first)


def _ends(positions: Positions) -> tuple[int, int]:
    low, high = positions.aminmax()
    return int(low), int(high)


def run_ends(positions: Positions) -> Positions:
    """For each position the last of its run: where a position does not rise, a new document begins."""
    length = positions.shape[1]
    slots = torch.arange(length, device=positions.device)
    last = torch.ones_like(positions, dtype=torch.bool)
    last[:, :-1] = positions[:, 1:] <= positions[:, :-1]
    end_slot = slots.where(last, length - 1).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, end_slot)
