"""The terms of a bias as tiles.cpp reads them: one number per distance, levels, straight lines and profiles.

A term is plain numbers and, apart from them, tensors, so that these can be saved for the backward pass. All tables of a
bias add up to one strip. What the kernel adds up backward becomes the gradients of the bias's own tensors.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native.padding import padded
from lengthwise.bias import DistanceBias, LevelBias, LineBias, QueryDistanceBias, at_least_float32, flat_terms

COLUMNS = 128
"""The kernel reads the bias in blocks of so many keys, so a strip has as much room behind."""

TERMS = 4
"""The kernel has room for so many terms of a bias, where all tables are one."""

LINES = 256
"""The kernel has room for so many straight lines in a term."""

GAPS = "positions have gaps, so that distances do not follow the slots"

STRIP, LEVEL, LOG_LEVEL, LINE, PROFILE = 1, 2, 3, 4, 5
CURVES = {"linear": LEVEL, "log1p_square": LOG_LEVEL}

TERM_COUNTS = (
    *("kind", "learned", "strip_batches", "strip_heads", "level_batches", "level_heads"),
    *("slope_batches", "slope_heads", "slope_queries", "factor_batches", "knot_count"),
    *("row_batches", "row_heads", "profile_heads", "profile_count", "profile_length"),
    *("of_keys", "is_zero", "origin_batches"),
)
TERM_ARRAYS = (
    *("strip", "query_level", "key_level", "slope", "factor", "knots", "line_slope", "line_start"),
    *("rows", "by_profile", "by_distance", "origin"),
    *("d_strip", "d_query_level", "d_key_level", "d_slope", "d_factor", "d_line_slope", "d_line_start"),
    *("d_rows", "d_profiles"),
)

Tensors = Mapping[str, Tensor]
"""Arrays by the name of the kernel's field; those of a term have its number before: "0.strip"."""


class TermRecord(ctypes.Structure):
    """tiles.cpp's TermRecord, field by field."""

    _fields_ = [*((name, ctypes.c_int64) for name in TERM_COUNTS), *((name, ctypes.c_void_p) for name in TERM_ARRAYS)]


@dataclass(frozen=True)
class Term:
    """One term of the bias in plain numbers; its tensors are apart, so that they can be saved."""

    counts: dict[str, int]
    sources: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of the tensors that a gradient may flow to."""

    @property
    def kind(self) -> int:
        """STRIP, LEVEL, LOG_LEVEL, LINE or PROFILE."""
        return self.counts["kind"]

    def outputs(self, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """Where the kernel adds up gradients, for every sequence and head."""
        shape, queries, keys = (counts["batch"], counts["heads"]), counts["queries"], counts["keys"]
        found: dict[str, Tensor] = {}
        if self.kind in (STRIP, LINE):
            found["d_strip"] = torch.zeros(*shape, queries + keys + COLUMNS)
        if self.kind == LINE:
            lines = self.counts["knot_count"] + 1
            found["d_factor"] = torch.zeros(*shape, queries)
            found["d_line_slope"], found["d_line_start"] = torch.zeros(2, *shape, lines)
        elif self.kind == PROFILE:
            width, length = self.counts["profile_count"], self.counts["profile_length"]
            found["d_rows"] = torch.zeros(*shape, keys if self.counts["of_keys"] else queries, width)
            found["d_profiles"] = torch.zeros(*shape, length, width)
        elif self.kind != STRIP:
            found["d_slope"] = torch.zeros(*shape, queries)
            found["d_query_level"] = torch.zeros(*shape, queries, dtype=torch.float64)
            found["d_key_level"] = torch.zeros(*shape, keys, dtype=torch.float64)
        return found

    def gradients(self, results: Tensors, columns: Sequence[Tensor]) -> list[Tensor]:
        """Those of the sources, from what the kernel added up."""
        if self.kind == STRIP:
            tables = [size for size, _ in self.sources]
            raw = [_of_table(size, own, results["d_strip"]) for size, own in zip(tables, columns, strict=True)]
        elif self.kind == LINE:
            of_curve = _of_table(self.sources[0][0], columns[0], results["d_strip"])
            raw = [of_curve, results["d_factor"].sum(1), results["d_factor"].new_zeros(self.counts["knot_count"])]
            raw += [results[name].sum(0) for name in ("d_line_slope", "d_line_start")]
        elif self.kind == PROFILE:
            count = self.sources[0][0][3]
            of_heads = results["d_profiles"].sum(0)[..., :count].flip(1).transpose(1, 2)
            raw = [results["d_rows"][..., :count], of_heads]
        else:
            raw = [results[name] for name in ("d_query_level", "d_key_level", "d_slope")]
            raw += raw[:2] if len(self.sources) > 3 else []  # a level's rest moves the difference as the level does
        return [d.sum_to_size(size).to(dtype) for d, (size, dtype) in zip(raw, self.sources, strict=True)]


def _of_table(size: torch.Size, columns: Int[Tensor, "batch column"], d_strip: Tensor) -> Tensor:
    """The gradient of a table from that of the strip that was read from it."""
    d_table = torch.zeros(size)
    if size[0] == 1:
        d_strip = d_strip.sum(1, keepdim=True)
    if columns.shape[0] == 1:
        d_strip = d_strip.sum(0, keepdim=True)
    for own, part in zip(columns, d_strip, strict=True):
        d_table.scatter_add_(1, own.expand(len(d_table), -1), part)
    return d_table


def terms_of(call: AttentionCall) -> tuple[tuple[Term, ...], dict[str, Tensor], tuple[Tensor, ...]] | Refusal:
    """The terms of the bias in plain numbers, what the kernel reads of them, and their sources."""
    found: list[tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]] = []
    flat = flat_terms(call.bias)
    tables = [term for term in flat if isinstance(term, DistanceBias)]
    others = [term for term in flat if not isinstance(term, DistanceBias)]
    if any(not isinstance(term, LevelBias | LineBias | QueryDistanceBias) for term in others):
        return Refusal.because(
            "its tiles know tables and profiles of distances, levels of tokens, straight lines and sums of them"
        )
    if bool(tables) + len(others) > TERMS:
        return Refusal.because(f"its tiles add up to {TERMS} terms of a bias, all tables being one, got more")
    if tables:
        columns = [_strip_columns(call, table) for table in tables]
        if any(own is None for own in columns):
            return Refusal.because(GAPS)
        found.append(_strip_term(tables, [own for own in columns if own is not None]))
    for term in others:
        if isinstance(term, LevelBias):
            found.append(_level_term(term.summed()))
            continue
        if isinstance(term, QueryDistanceBias):
            offsets = call.slot_offsets(term)
            if offsets is None:
                return Refusal.because(GAPS)
            found.append(_profile_term(term, torch.tensor(offsets) + int(call.layout.start)))
            continue
        assert isinstance(term, LineBias)
        if term.slope.shape[1] > LINES:
            return Refusal.because(f"its tiles know up to {LINES} straight lines, got {term.slope.shape[1]}")
        if not _falls_along_rows(term):
            return Refusal.because("straight lines must be of a number that falls along a row, towards the query")
        own = _strip_columns(call, term.curve)
        if own is None:
            return Refusal.because(GAPS)
        found.append(_line_term(term, call.heads, own))
    tensors = {f"{n}.{name}": x for n, (_, arrays, _) in enumerate(found) for name, x in arrays.items()}
    return tuple(term for term, _, _ in found), tensors, tuple(x for _, _, sources in found for x in sources)


def _term(kind: int, sources: tuple[Tensor, ...], **counts: int) -> Term:
    own = dict.fromkeys((name for name in TERM_COUNTS if name != "learned"), 0) | counts | {"kind": kind}
    return Term(own, tuple((source.shape, source.dtype) for source in sources))


def _strip_term(
    tables: list[DistanceBias], columns: list[Tensor]
) -> tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]:
    strips = [_strip(table, own) for table, own in zip(tables, columns, strict=True)]
    strip = strips[0]
    for other in strips[1:]:
        strip = strip + other
    sources = tuple(table.table for table in tables)
    arrays = {"strip": strip.contiguous()} | {f"columns{n}": own for n, own in enumerate(columns)}
    return _term(STRIP, sources, strip_batches=strip.shape[0], strip_heads=strip.shape[1]), arrays, sources


def _strip(bias: DistanceBias, columns: Tensor) -> Float[Tensor, "#batch head column"]:
    return at_least_float32(bias.table.detach()).float()[:, columns].transpose(0, 1)


def _strip_columns(call: AttentionCall, bias: DistanceBias) -> Int[Tensor, "#batch column"] | None:
    """Which column of the table a key `x - queries + 1` slots after its query has, for every x; None with gaps."""
    offsets = call.slot_offsets(bias)
    if offsets is None:
        return None
    after = torch.arange(call.queries + call.keys + COLUMNS) - (call.queries - 1)
    distance = torch.tensor(offsets)[:, None] + int(call.layout.start) - after - bias.first
    return distance.clamp(0, bias.table.shape[1] - 1)


def _level_term(bias: LevelBias) -> tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]:
    assert bias.query_level is not None
    assert bias.key_level is not None
    batch, heads = torch.broadcast_shapes(bias.query_level.shape[:2], bias.key_level.shape[:2])
    arrays = {}
    for side in ("query", "key"):
        level, rest = getattr(bias, f"{side}_level").detach().double(), getattr(bias, f"{side}_rest")
        level = level if rest is None else level + rest.detach().double()
        arrays[f"{side}_level"] = level.expand(batch, heads, -1).contiguous()
    arrays["slope"] = bias.slope.detach().float().contiguous()
    slopes = dict(zip(("slope_batches", "slope_heads", "slope_queries"), bias.slope.shape, strict=True))
    sources = tuple(bias.sources)
    return _term(CURVES[bias.curve], sources, level_batches=batch, level_heads=heads, **slopes), arrays, sources


def _line_term(bias: LineBias, heads: int, columns: Tensor) -> tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]:
    strip = _strip(bias.curve, columns).contiguous()
    lines = {"factor": bias.factor, "knots": bias.knots, "line_slope": bias.slope, "line_start": bias.intercept}
    arrays = {name: x.detach().float() for name, x in lines.items()}
    # The kernel has lines for every head.
    arrays |= {name: arrays[name].expand(heads, -1) for name in ("line_slope", "line_start")}
    arrays = {name: x.contiguous() for name, x in arrays.items()}
    counts = {"strip_batches": strip.shape[0], "strip_heads": 1, "factor_batches": bias.factor.shape[0]}
    sources = (bias.curve.table, *lines.values())
    term = _term(LINE, sources, knot_count=bias.knots.shape[0], **counts)
    return term, arrays | {"strip": strip, "columns0": columns}, sources


def _profile_term(
    bias: QueryDistanceBias, distance: Int[Tensor, " #batch"]
) -> tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]:
    """`distance` is that of the first query and the first key. The kernel's profiles run against the distance."""
    rows, profiles = padded(bias.rows.detach()), bias.profiles.detach().float().flip(2)
    by_distance = F.pad(profiles.transpose(1, 2), (0, rows.shape[3] - profiles.shape[1])).contiguous()
    heads, length, width = by_distance.shape
    origin = length - 1 - (distance - bias.first)
    arrays = {"rows": rows, "by_profile": by_distance.transpose(1, 2).contiguous(), "by_distance": by_distance}
    counts = {"row_batches": rows.shape[0], "row_heads": rows.shape[1], "origin_batches": origin.shape[0]}
    counts |= {"profile_heads": heads, "profile_count": width, "profile_length": length}
    counts |= {"of_keys": int(bias.side == "key"), "is_zero": int(bias.beyond == "zero")}
    sources = (bias.rows, bias.profiles)
    return _term(PROFILE, sources, **counts), arrays | {"origin": origin}, sources


def _falls_along_rows(bias: LineBias) -> bool:
    """Whether the number that lines are of never rises from one key to the next, and knots never fall."""
    table, knots = bias.curve.table, bias.knots
    rising = (table[:, 1:] >= table[:, :-1]).all() & (knots[1:] >= knots[:-1]).all() & (bias.factor >= 0).all()
    return bool(rising)
