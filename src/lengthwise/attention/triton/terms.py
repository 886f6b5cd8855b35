"""The bias of a call as the kernels know it: one of each kind, and several tables where they follow the slots."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton import tiles
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, SumBias


@dataclass(frozen=True)
class Terms:
    """Each term with the name that its tensors begin with."""

    tables: tuple[tuple[str, DistanceBias], ...] = ()
    level: tuple[str, LevelBias] | None = None
    line: tuple[str, LineBias] | None = None
    profile: tuple[str, QueryDistanceBias] | None = None


def terms_of(bias: Bias | None) -> Terms | Refusal:
    """The terms, or why the kernels do not have them."""
    by_kind: dict[type, list[tuple[str, Bias]]] = {}
    for name, term in _flattened("bias", bias):
        by_kind.setdefault(type(term), []).append((name, term))
    kinds = (DistanceBias, LevelBias, LineBias, QueryDistanceBias)
    if others := [kind.__name__ for kind in by_kind if kind not in kinds]:
        return Refusal.because(
            f"its kernels know tables and profiles of distances, levels of tokens and straight lines, got {others[0]}"
        )
    if several := [kind.__name__ for kind in kinds[1:] if len(by_kind.get(kind, ())) > 1]:
        return Refusal.because(f"its kernels add up one {several[0]}, got more")
    single = {kind: by_kind[kind][0] if kind in by_kind else None for kind in kinds[1:]}
    return Terms(tuple(by_kind.get(DistanceBias, ())), *single.values())  # type: ignore[arg-type]


def _flattened(name: str, bias: Bias | None) -> Iterator[tuple[str, Bias]]:
    if isinstance(bias, SumBias):
        for n, term in enumerate(bias.terms):
            yield from _flattened(f"{name}.terms.{n}", term)
    elif bias is not None:
        yield name, bias


def offsets_of(call: AttentionCall, terms: Terms) -> dict[str, int] | None:
    """By how much distances of each table exceed those of slots, for each sequence; None where nobody knows."""
    notes: dict[str, int] = {}
    for n, (_, table) in enumerate(terms.tables):
        offsets = call.slot_offsets(table)
        if offsets is None:
            return None
        notes |= {f"offset.{n}.{row}": offset for row, offset in enumerate(offsets)}
    return notes


def noted_offsets(notes: Mapping[str, int], table: int) -> list[int]:
    """The offsets of one table, out of `offsets_of`."""
    offsets: list[int] = []
    while f"offset.{table}.{len(offsets)}" in notes:
        offsets.append(notes[f"offset.{table}.{len(offsets)}"])
    return offsets


def can_skip(call: AttentionCall, terms: Terms, *, follows_slots: bool, shortest: int | None = None) -> bool:
    """Whether keys may be skipped: every row has one of its own, and the bias is one that falls and has a bound.

    Of fewer keys than `shortest`, tiles.SHORTEST if it is not given, none is.
    """
    shortest = tiles.SHORTEST if shortest is None else shortest
    start = call.layout.start
    if isinstance(start, Tensor) or call.keys < shortest or call.queries < tiles.BOUNDED_ROWS or not call.sees_own_keys:
        return False
    falls = bool(terms.tables) or terms.level is not None
    bounded = (follows_slots or not terms.tables) and terms.line is None and terms.profile is None
    bounded = bounded and (terms.level is None or terms.level[1].curve == "linear")
    return call.skip and call.softcap is None and falls and bounded
