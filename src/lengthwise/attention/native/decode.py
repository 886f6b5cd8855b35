"""A few queries against many keys, as in decoding: one pass over the cache where it lies, the bias made on the way."""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native import build
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, flat_terms

PRECISIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CURVES = {"linear": 0, "log1p_square": 1}
TABLE, LINES, LEVELS, DENSE, PROFILES = range(5)
FAR = 2**31
"""Further than any key is away: no end of a band, and more than any window needs."""

# The structures of decode.cpp, number by number. An array is its address and its strides; without one all are 0.
CALL = struct.Struct("=14q2d12q2q8q2q3q2q3q2q")
TERM = struct.Struct("=19q")
BAND = struct.Struct("=4q")
NO_ARRAY = {axes: (0,) * (1 + axes) for axes in (1, 2, 3)}

Numbers = tuple[int, ...]
Held = list[Tensor]
"""Whatever the kernel reads by its address, kept until it is done."""


@dataclass(frozen=True)
class DecodePlan(Plan):
    """The terms of the bias, which are added one after the other."""

    terms: tuple[Bias, ...]

    def run(self, call: AttentionCall) -> Output:
        """The output and, where asked for, the log-sum-exp."""
        q, k, v = _side_by_side(call.q), _side_by_side(call.k), _side_by_side(call.v)
        batch, heads, queries, dim = q.shape
        keys, value = v.shape[2:]
        out = q.new_empty(batch, heads, queries, value, dtype=torch.float32)
        lse = q.new_empty(batch, heads, queries, dtype=torch.float32) if call.return_lse else None
        held = [q, k, v]
        terms = [_term(term, call, held) for term in self.terms]
        visibility = call.visibility
        numbers = CALL.pack(
            *(batch, heads, call.group, queries, keys, dim, value, PRECISIONS[q.dtype]),
            *(visibility.is_causal, min(visibility.window or 0, FAR), int(call.layout.start), torch.get_num_threads()),
            *(len(terms), len(visibility.bands), call.scale, call.softcap or 0.0),
            # These are never spread: whether an axis of 1 has a stride is all the same.
            *(q.data_ptr(), *q.stride()[:3], k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3]),
            *(out.data_ptr(), 0 if lse is None else lse.data_ptr()),
            *(NO_ARRAY[3] if call.logit_scale is None else _array(_as_float32(call.logit_scale, held), 3)),
            *(NO_ARRAY[3] if call.sink is None else _array(_as_float32(call.sink, held), 3)),
            *_masks(call, held),
        )
        bands = [BAND.pack(*map(_bounded, (x.nearest, x.farthest, x.first, x.chunk))) for x in visibility.bands]
        all_finite = build.library().lengthwise_decode(b"".join((numbers, *terms, *bands)))
        if not all_finite:
            # The kernel uses nothing that a row does not see. So it is right but for rows that see what is not finite
            # and lost it, as a score of -infinity loses its key.
            _, taint = finite_inputs(call)
            if taint is not None:
                out, lse = out + taint[..., None], None if lse is None else lse + taint
        return out if call.dtype == torch.float32 else out.to(call.dtype), lse


def plan(call: AttentionCall) -> DecodePlan | Refusal:
    """Every bias and every mask but an explicit one, which the native backend refuses before."""
    terms = tuple(flat_terms(call.bias))
    for term in terms:
        start = term.start if isinstance(term, LevelBias) and term.step is not None else 0
        if start and not 0 <= start <= call.keys - call.queries:
            return Refusal.because(f"levels by steps give none to queries from slot {start} on")
    return DecodePlan(terms)


def _term(bias: Bias, call: AttentionCall, held: Held) -> bytes:
    if isinstance(bias, DistanceBias):
        numbers = (TABLE, *_table(bias, held))
    elif isinstance(bias, QueryDistanceBias):
        numbers = (PROFILES, *_profiles(bias, held))
    elif isinstance(bias, LevelBias):
        numbers = (LEVELS, *_levels(bias, held))
    elif isinstance(bias, LineBias):
        knots = _row_by_row(bias.knots, torch.float32, held)
        slope, intercept = (_row_by_row(x, torch.float32, held) for x in (bias.slope, bias.intercept))
        factor = (*_array(_as_float32(bias.factor, held), 2), knots.data_ptr(), knots.shape[0])
        numbers = (LINES, *_table(bias.curve, held), *factor, *_array(slope, 1), *_array(intercept, 1))
    else:
        value = bias.dense().expand(-1, -1, call.queries, call.keys)
        numbers = (DENSE, *_array(_row_by_row(value, torch.float32, held), 3))
    return TERM.pack(*numbers, *(0,) * (TERM.size // 8 - len(numbers)))


def _table(bias: DistanceBias, held: Held) -> Numbers:
    entries = _row_by_row(bias.table, torch.float32, held)
    query, key = _row_by_row(bias.query, torch.int64, held), _row_by_row(bias.key, torch.int64, held)
    return (*_array(entries, 1), entries.shape[1], bias.first, *_array(query, 2), *_array(key, 1))


def _profiles(bias: QueryDistanceBias, held: Held) -> Numbers:
    rows, profiles = (_row_by_row(x, torch.float32, held) for x in (bias.rows, bias.profiles))
    query, key = _row_by_row(bias.query, torch.int64, held), _row_by_row(bias.key, torch.int64, held)
    sizes = (*profiles.shape[1:], bias.first, bias.side == "key", bias.beyond == "zero")
    return (*_array(rows, 3), *_array(profiles, 2), *sizes, *_array(query, 2), *_array(key, 1))


def _levels(bias: LevelBias, held: Held) -> Numbers:
    slope, step = _array(_as_float32(bias.slope, held), 3), bias.step
    if step is not None and step.dtype != torch.float64:
        return (CURVES[bias.curve], bias.start, *slope, *_array(_as_float32(step, held), 3))
    bias = bias.summed()
    query, key = bias.query_level, bias.key_level
    assert query is not None
    assert key is not None
    if bias.query_rest is not None and bias.key_rest is not None:
        query, key = query.double() + bias.query_rest, key.double() + bias.key_rest
    query, key = _row_by_row(query, torch.float64, held), _row_by_row(key, torch.float64, held)
    return (CURVES[bias.curve], 0, *slope, *NO_ARRAY[3], *_array(query, 3), *_array(key, 2))


def _masks(call: AttentionCall, held: Held) -> Numbers:
    """Padding, documents of queries and keys, and their numbers in them."""
    layout = call.layout
    padding, documents, indices = NO_ARRAY[1], NO_ARRAY[2] + NO_ARRAY[1], NO_ARRAY[2] + NO_ARRAY[1]
    if layout.key_mask is not None:
        padding = _array(_row_by_row(layout.key_mask, torch.bool, held), 1)
    if layout.query_documents is not None and layout.key_documents is not None:
        documents = _of_queries_and_keys(layout.query_documents, layout.key_documents, held)
    if call.visibility.bands:
        indices = _of_queries_and_keys(*layout.indices(), held)
    return padding + documents + indices


def _of_queries_and_keys(query: Tensor, key: Tensor, held: Held) -> Numbers:
    query, key = _row_by_row(query, torch.int64, held), _row_by_row(key, torch.int64, held)
    return _array(query, 2) + _array(key, 1)


def _bounded(number: int | None) -> int:
    """So small that products of two fit; no end is far away."""
    return FAR if number is None else max(-FAR, min(number, FAR))


def _side_by_side(x: Tensor) -> Tensor:
    """As it is if the kernel has its precision and its channels lie side by side."""
    if x.dtype not in PRECISIONS or (x.dtype == torch.float16 and not build.library().lengthwise_takes_half()):
        x = x.float()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _row_by_row(x: Tensor, dtype: torch.dtype, held: Held) -> Tensor:
    """In a precision, with the last axis contiguous: as it is, if it can be."""
    x = x if x.dtype == dtype else x.to(dtype)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    held.append(x)
    return x


def _as_float32(x: Tensor, held: Held) -> Tensor:
    x = x if x.dtype == torch.float32 else x.float()
    held.append(x)
    return x


def _array(x: Tensor, axes: int) -> Numbers:
    """The address and the strides of the first axes, 0 where there is one for all."""
    strides = x.stride()[:axes]
    if 1 in x.shape:
        strides = tuple([0 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=False)])
    return (x.data_ptr(), *strides)
