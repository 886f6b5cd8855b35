"""The bias of a call as the kernels know it: one of each kind, and several tables where they follow the slots."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
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
    found: dict[type, list[tuple[str, Bias]]] = {}
    for name, term in _flattened("bias", bias):
        found.setdefault(type(term), []).append((name, term))
    kinds = (DistanceBias, LevelBias, LineBias, QueryDistanceBias)
    if others := [kind.__name__ for kind in found if kind not in kinds]:
        return Refusal.because(
            f"its kernels know tables and profiles of distances, levels of tokens and straight lines, got {others[0]}"
        )
    if several := [kind.__name__ for kind in kinds[1:] if len(found.get(kind, ())) > 1]:
        return Refusal.because(f"its kernels add up one {several[0]}, got more")
    single = {kind: found[kind][0] if kind in found else None for kind in kinds[1:]}
    return Terms(tuple(found.get(DistanceBias, ())), *single.values())  # type: ignore[arg-type]


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
