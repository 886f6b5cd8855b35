"""Attention in tiles of rows and keys, forward and backward: the Python side of tiles.cpp.

It takes biases that are one number per distance (up to any number of tables, which add up to one strip), levels of
tokens, straight lines, profiles that tokens mix, and sums of them; and masks that leave every query a few intervals of
keys, with padding anywhere. A plan holds whatever the kernel reads but q, k and v. What the backward pass reads again
is saved for it as tensors, so that checkpointing and offloading see all of it, and nothing else outlives the forward
pass.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native import build
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, SumBias, at_least_float32
from lengthwise.token_layout import TokenLayout, row_of

COLUMNS = 128
"""The kernel reads the bias in blocks of so many keys, so a strip has as much room behind."""

CHANNELS = 16
"""The kernel reads heads in pieces of so many channels."""

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
COUNTS = (
    *("batch", "heads", "group", "queries", "keys", "dim", "value", "start"),
    *("bands", "mask_batches", "skip", "threads", "term_count"),
)
ARRAYS = (
    *("q", "k", "v", "low", "high", "key_mask", "logit_scale", "sink", "out", "lse", "peak", "log_total"),
    *("d_out", "d_lse", "d_q", "d_k", "d_v", "d_logit_scale", "d_sink", "visited"),
)

Tensors = Mapping[str, Tensor]
"""Arrays by the name of the kernel's field; those of a term have its number before: "0.strip"."""


class TermRecord(ctypes.Structure):
    """tiles.cpp's TermRecord, field by field."""

    _fields_ = [*((name, ctypes.c_int64) for name in TERM_COUNTS), *((name, ctypes.c_void_p) for name in TERM_ARRAYS)]


class Record(ctypes.Structure):
    """tiles.cpp's Problem, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in COUNTS),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        ("terms", TermRecord * TERMS),
    ]


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


@dataclass(frozen=True)
class Problem:
    """One call in plain numbers."""

    counts: dict[str, int]
    scale: float
    softcap: float
    terms: tuple[Term, ...]

    def run(self, function: str, tensors: Tensors, learned: Sequence[bool] = ()) -> None:
        """Call the kernel; a missing array is a null pointer."""
        pointers = {name: tensors[name].data_ptr() for name in ARRAYS if name in tensors}
        record = Record(**self.counts, scale=self.scale, softcap=self.softcap, **pointers)
        for n, term in enumerate(self.terms):
            own = {name: tensors[f"{n}.{name}"].data_ptr() for name in TERM_ARRAYS if f"{n}.{name}" in tensors}
            record.terms[n] = TermRecord(**term.counts, **own, learned=int(bool(learned) and learned[n]))
        getattr(build.library(), function)(ctypes.byref(record))


@dataclass(frozen=True, eq=False)
class TilesPlan(Plan):
    """What the kernel needs but q, k and v."""

    problem: Problem
    tensors: dict[str, Tensor]
    """Detached, as the kernel reads them."""
    sources: tuple[Tensor, ...]
    """The tensors of the bias that a gradient may flow to, term by term."""

    def run(self, call: AttentionCall) -> Output:
        """The output and the log-sum-exp."""
        clean, taint = finite_inputs(call)
        lse: Tensor | None
        if call.needs_grad:
            extras = clean.logit_scale, clean.sink
            out, lse = _Attention.apply(self, call.return_lse, clean.q, clean.k, clean.v, *extras, *self.sources)
        else:
            found = self.forward(clean.q, clean.k, clean.v)
            out, lse = found["out"][..., : call.v.shape[3]].to(call.dtype).contiguous(), found["lse"]
        if taint is not None:
            out, lse = out + taint[..., None].to(out.dtype), None if lse is None else lse + taint
        return out, lse

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """All that the kernel reads, and what it found: the output, the log-sum-exp and how many keys were visited."""
        tensors = self.tensors | {name: _padded(x.detach()) for name, x in (("q", q), ("k", k), ("v", v))}
        shape = tensors["q"].shape[:3]
        tensors["out"] = tensors["q"].new_empty(*shape, tensors["v"].shape[3])
        tensors |= {name: tensors["q"].new_empty(shape) for name in ("lse", "peak", "log_total")}
        tensors["visited"] = torch.zeros(shape[:2], dtype=torch.int64)
        self.problem.run("lengthwise_forward", tensors)
        return tensors


def plan(call: AttentionCall) -> TilesPlan | Refusal:
    """What the kernel needs, or why it cannot take the call."""
    call = call.with_known_start()
    masks = _masks(call)
    if isinstance(masks, Refusal):
        return masks
    terms = _terms(call)
    if isinstance(terms, Refusal):
        return terms
    made, tensors, sources = terms
    tensors |= masks
    for name in ("logit_scale", "sink"):
        if (extra := getattr(call, name)) is not None:
            spread = extra.detach().float().expand(call.batch, call.heads, call.queries)
            tensors[name] = spread.contiguous()
    counts = {
        "batch": call.batch,
        "heads": call.heads,
        "group": call.group,
        "queries": call.queries,
        "keys": call.keys,
        "dim": _up(call.q.shape[3]),
        "value": _up(call.v.shape[3]),
        "start": int(call.layout.start),
        "bands": masks["low"].shape[0],
        "mask_batches": masks["key_mask"].shape[0] if "key_mask" in masks else 0,
        "skip": int(call.skip and call.visibility.is_causal and _can_fall(made)),
        "threads": torch.get_num_threads(),
        "term_count": len(made),
    }
    return TilesPlan(Problem(counts, call.scale, call.softcap or 0.0, made), tensors, sources)


def _can_fall(terms: Sequence[Term]) -> bool:
    """Whether a term other than profiles may be so low far away that keys can be skipped, and all have a bound."""
    kinds = {term.kind for term in terms}
    return bool(kinds - {PROFILE}) and LINE not in kinds


def skipped_share(call: AttentionCall) -> float:
    """How much of the work that the masks leave is left out, 0 to 1."""
    visited = []
    for skip in (True, False):
        own = plan(replace(call, skip=skip))
        if isinstance(own, Refusal):
            raise NotImplementedError("; ".join(own.reasons))
        visited.append(int(own.forward(call.q, call.k, call.v)["visited"].sum()))
    return 1 - visited[0] / max(1, visited[1])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: TilesPlan,
        return_lse: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_extras_and_sources: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        found = plan.forward(q, k, v)
        lse = found.pop("lse")
        del found["visited"]
        ctx.problem, ctx.names = plan.problem, tuple(found)
        ctx.given = tuple((x.shape, x.dtype) for x in (q, k, v))
        ctx.extras = tuple(None if x is None else (x.shape, x.dtype) for x in _extras_and_sources[:2])
        ctx.save_for_backward(*found.values())
        ctx.set_materialize_grads(False)
        # A copy: backward the kernel reads its output again, which the caller may have changed in place by then.
        return found["out"][..., : v.shape[3]].to(q.dtype, copy=True), lse if return_lse else None

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        gradients = _gradients(ctx, d_out, d_lse)
        if torch.is_grad_enabled():  # under create_graph: these can be had, but not be differentiated
            given = [n for n, gradient in enumerate(gradients) if gradient is not None]
            kept = _FirstDerivatives.apply(torch.zeros((), requires_grad=True), *(gradients[n] for n in given))
            for n, gradient in zip(given, kept, strict=True):
                gradients[n] = gradient
        return (None, None, *gradients)


class _FirstDerivatives(torch.autograd.Function):
    """Gradients as they are; theirs are refused."""

    @staticmethod
    def forward(_ctx: Any, _needed: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.clone() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise NotImplementedError(
            "native's gradients must not be differentiated again; a second derivative was asked for. "
            'Use backend="reference" for that call.'
        )


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> list[Tensor | None]:
    """Those of q, k, v, logit_scale, sink and the sources of the bias; None where none is needed."""
    problem, counts = ctx.problem, ctx.problem.counts
    tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
    needed = ctx.needs_input_grad[2:]
    learned, first = [], 5
    for term in problem.terms:
        learned.append(any(needed[first : first + len(term.sources)]))
        first += len(term.sources)
    shape, rows = (counts["batch"], counts["heads"]), tensors["peak"].shape
    found = {
        "d_q": torch.zeros_like(tensors["q"]),
        "d_k": tensors["k"].new_zeros(*shape, *tensors["k"].shape[2:]),
        "d_v": tensors["v"].new_zeros(*shape, *tensors["v"].shape[2:]),
    }
    for name, is_needed in zip(("d_logit_scale", "d_sink"), needed[3:5], strict=True):
        if is_needed:
            found[name] = torch.zeros(rows)
    for n, term in enumerate(problem.terms):
        if learned[n]:
            found |= {f"{n}.{name}": x for name, x in term.outputs(counts).items()}
    upstream = {"d_out": torch.zeros_like(tensors["out"]) if d_out is None else _padded(d_out.detach())}
    if d_lse is not None:
        upstream["d_lse"] = d_lse.detach().float().contiguous()
    problem.run("lengthwise_backward", tensors | found | upstream, learned)

    gradients: list[Tensor | None] = []
    for name, (size, dtype) in zip(("d_q", "d_k", "d_v"), ctx.given, strict=True):
        own = found[name][..., : size[3]]
        grouped = own if size[1] == own.shape[1] else own.unflatten(1, (size[1], -1)).sum(2)
        gradients.append(grouped.to(dtype))
    for name, extra in zip(("d_logit_scale", "d_sink"), ctx.extras, strict=True):
        gradients.append(found[name].sum_to_size(extra[0]).to(extra[1]) if name in found else None)
    for n, term in enumerate(problem.terms):
        if not learned[n]:
            gradients += [None] * len(term.sources)
            continue
        own = {name.partition(".")[2]: x for name, x in found.items() if name.startswith(f"{n}.")}
        columns = [x for name, x in tensors.items() if name.startswith(f"{n}.columns")]
        gradients += term.gradients(own, columns)
    return gradients


def _terms(call: AttentionCall) -> tuple[tuple[Term, ...], dict[str, Tensor], tuple[Tensor, ...]] | Refusal:
    """The terms of the bias in plain numbers, what the kernel reads of them, and their sources."""
    found: list[tuple[Term, dict[str, Tensor], tuple[Tensor, ...]]] = []
    flat = _flattened(call.bias)
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


def _flattened(bias: Bias | None) -> list[Bias]:
    if isinstance(bias, SumBias):
        return [part for term in bias.terms for part in _flattened(term)]
    return [] if bias is None else [bias]


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
    rows, profiles = _padded(bias.rows.detach()), bias.profiles.detach().float().flip(2)
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


def _masks(call: AttentionCall) -> dict[str, Tensor] | Refusal:
    """The intervals of keys that each query sees, and which keys are padding, if there is some between others."""
    visibility, mask = call.visibility, call.layout.key_mask
    order, (low, high) = visibility.intervals()
    if order is not None and not _is_identity(order):
        visibility = replace(visibility, layout=_in_order_of_appearance(call.layout))
        order, (low, high) = visibility.intervals()
        assert order is not None
        if not _is_identity(order):
            return Refusal.because("a document is in more than one piece, so that its keys are no interval")
    tensors = {}
    if mask is not None and mask.numel():
        first, last = _ends(mask)
        low, high = torch.maximum(low, first[:, None]), torch.minimum(high, last[:, None])
        if bool((mask.sum(1) != last - first).any()):
            tensors["key_mask"] = mask.to(torch.uint8).contiguous()
    for name, ends in (("low", low), ("high", high)):
        tensors[name] = ends.expand(-1, call.batch, -1).int().contiguous()
    return tensors


def _is_identity(order: Int[Tensor, "#batch key"]) -> bool:
    return bool((order == torch.arange(order.shape[1])).all())


def _in_order_of_appearance(layout: TokenLayout) -> TokenLayout:
    """The same layout with documents numbered by which of them comes first among the keys."""
    assert layout.key_documents is not None
    assert layout.query_documents is not None
    keys, queries = [], []
    for row in range(layout.batch):
        own = row_of(layout.key_documents, row)
        numbers, place = torch.cat([own, row_of(layout.query_documents, row)]).unique(return_inverse=True)
        first = torch.full_like(numbers, len(place)).scatter_reduce(0, place, torch.arange(len(place)), "amin")
        renumbered = first[place]
        keys.append(renumbered[: len(own)])
        queries.append(renumbered[len(own) :])
    return replace(layout, key_documents=torch.stack(keys), query_documents=torch.stack(queries))


def _ends(mask: Bool[Tensor, "#batch key"]) -> tuple[Int[Tensor, " #batch"], Int[Tensor, " #batch"]]:
    """The first True and one past the last; both 0 where there is none."""
    keys, some = mask.shape[1], mask.any(1)
    first = mask.int().argmax(1)
    last = keys - mask.flip(1).int().argmax(1)
    return first.where(some, 0), last.where(some, 0)


def _padded(x: Float[Tensor, "batch head position dim"]) -> Float[Tensor, "batch head position wider"]:
    """float32 with zeros up to a multiple of the channels that the kernel's registers hold."""
    missing = _up(x.shape[3]) - x.shape[3]
    x = F.pad(x.float(), (0, missing)) if missing else x.float()
    return x.contiguous()


def _up(dim: int) -> int:
    return -(-dim // CHANNELS) * CHANNELS
