"""A few queries against many keys, as in decoding: one pass over the cache where it lies, the bias made on the way."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.finite import finite_inputs
from lengthwise.attention.native import build
from lengthwise.attention.plan import Output, Plan, Refusal
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, SumBias

PRECISIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CURVES = {"linear": 0, "log1p_square": 1}
FAR = 2**31
"""Further than any key is away: no end of a band, and more than any window needs."""

Pointer, Number, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
Two, Three = Number * 2, Number * 3


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Table(ctypes.Structure):
    """decode.cpp's Table, field by field; so are all that follow."""

    _fields_ = [
        *_fields(Pointer, "entries"),
        *_fields(Number, "head_stride length first"),
        *_fields(Pointer, "query key"),
        *_fields(Two, "query_strides"),
        *_fields(Number, "key_stride"),
    ]


class Lines(ctypes.Structure):
    """Straight lines in what a table gives."""

    _fields_ = [
        *_fields(Table, "curve"),
        *_fields(Pointer, "factor"),
        *_fields(Two, "factor_strides"),
        *_fields(Pointer, "knots"),
        *_fields(Number, "knot_count"),
        *_fields(Pointer, "slope intercept"),
        *_fields(Number, "slope_stride intercept_stride"),
    ]


class Levels(ctypes.Structure):
    """Levels of queries and keys, or steps in their place."""

    _fields_ = [
        *_fields(Pointer, "slope"),
        *_fields(Three, "slope_strides"),
        *_fields(Number, "curve"),
        *_fields(Pointer, "query key"),
        *_fields(Three, "query_strides"),
        *_fields(Two, "key_strides"),
        *_fields(Pointer, "step"),
        *_fields(Three, "step_strides"),
        *_fields(Number, "start"),
    ]


class Dense(ctypes.Structure):
    """Rows that are filled in."""

    _fields_ = [*_fields(Pointer, "value"), *_fields(Three, "strides")]


KINDS: dict[type[ctypes.Structure], int] = {Table: 0, Lines: 1, Levels: 2, Dense: 3}


class Term(ctypes.Structure):
    """One term of the bias."""

    _fields_ = [*_fields(Number, "kind"), *_fields(Pointer, "of")]


class KeyBand(ctypes.Structure):
    """One Band."""

    _fields_ = _fields(Number, "nearest farthest first chunk")


class Decode(ctypes.Structure):
    """The whole call."""

    _fields_ = [
        *_fields(Number, "batch heads group queries keys dim value precision causal window start threads"),
        *_fields(Pointer, "q k v"),
        *_fields(Three, "q_strides k_strides v_strides"),
        *_fields(Pointer, "out lse"),
        *_fields(Real, "scale softcap"),
        *_fields(Pointer, "terms"),
        *_fields(Number, "term_count"),
        *_fields(Pointer, "logit_scale"),
        *_fields(Three, "logit_scale_strides"),
        *_fields(Pointer, "sink"),
        *_fields(Three, "sink_strides"),
        *_fields(Pointer, "key_mask"),
        *_fields(Number, "key_mask_stride"),
        *_fields(Pointer, "query_documents key_documents"),
        *_fields(Two, "query_document_strides"),
        *_fields(Number, "key_document_stride"),
        *_fields(Pointer, "bands"),
        *_fields(Number, "band_count"),
        *_fields(Pointer, "query_index key_index"),
        *_fields(Two, "query_index_strides"),
        *_fields(Number, "key_index_stride"),
    ]


Held = list[object]
"""Whatever the kernel reads by its address, kept until it is done."""


@dataclass(frozen=True)
class DecodePlan(Plan):
    """The terms of the bias, which are added one after the other."""

    terms: tuple[Bias, ...]

    def run(self, call: AttentionCall) -> Output:
        """The output and, where asked for, the log-sum-exp."""
        q, k, v = (_channels_together(x) for x in (call.q, call.k, call.v))
        shape = (call.batch, call.heads, call.queries)
        out = q.new_empty(*shape, v.shape[3], dtype=torch.float32)
        lse = q.new_empty(shape, dtype=torch.float32) if call.return_lse else None
        visibility = call.visibility
        decode = Decode(
            *(call.batch, call.heads, call.group, call.queries, call.keys, q.shape[3], v.shape[3], PRECISIONS[q.dtype]),
            *(visibility.is_causal, min(visibility.window or 0, FAR), int(call.layout.start), torch.get_num_threads()),
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), _strides(q, 3), _strides(k, 3), _strides(v, 3)),
            *(out.data_ptr(), None if lse is None else lse.data_ptr()),
            *(call.scale, call.softcap or 0.0),
        )
        held: Held = [q, k, v]
        _add_terms(decode, self.terms, call, held)
        if call.logit_scale is not None:
            factor = _in_float32(call.logit_scale, held)
            decode.logit_scale, decode.logit_scale_strides = factor.data_ptr(), _strides(factor, 3)
        if call.sink is not None:
            sink = _in_float32(call.sink, held)
            decode.sink, decode.sink_strides = sink.data_ptr(), _strides(sink, 3)
        _add_masks(decode, call, held)
        all_finite = build.library().lengthwise_decode(ctypes.byref(decode))
        del held
        if not all_finite:
            # The kernel never reads a value that a row does not see: it is right but for rows that see what is not
            # finite and lost it, as a score of -infinity loses its key.
            _, taint = finite_inputs(call)
            if taint is not None:
                out, lse = out + taint[..., None], None if lse is None else lse + taint
        return out if call.dtype == torch.float32 else out.to(call.dtype), lse


def plan(call: AttentionCall) -> DecodePlan | Refusal:
    """Every bias and every mask but an explicit one, which the native backend refuses before."""
    terms = tuple(_flattened(call.bias)) if call.bias is not None else ()
    for term in terms:
        if isinstance(term, LevelBias) and term.step is not None:
            if not 0 <= term.start <= call.keys - call.queries:
                return Refusal.because(f"levels by steps give none to queries from slot {term.start} on")
    return DecodePlan(terms)


def _flattened(bias: Bias) -> list[Bias]:
    return [own for term in bias.terms for own in _flattened(term)] if isinstance(bias, SumBias) else [bias]


def _add_terms(decode: Decode, terms: tuple[Bias, ...], call: AttentionCall, held: Held) -> None:
    if not terms:
        return
    parts = [_described(term, call, held) for term in terms]
    array = (Term * len(parts))(*((KINDS[type(part)], ctypes.addressof(part)) for part in parts))
    decode.terms, decode.term_count = ctypes.addressof(array), len(parts)
    held += [parts, array]


def _described(bias: Bias, call: AttentionCall, held: Held) -> ctypes.Structure:
    if isinstance(bias, DistanceBias):
        return _table(bias, held)
    if isinstance(bias, LevelBias):
        return _levels(bias, held)
    if isinstance(bias, LineBias):
        factor = _in_float32(bias.factor, held)
        knots, slope, intercept = (
            _row_by_row(x, torch.float32, held) for x in (bias.knots, bias.slope, bias.intercept)
        )
        return Lines(
            _table(bias.curve, held),
            *(factor.data_ptr(), _strides(factor, 2), knots.data_ptr(), knots.shape[0]),
            *(slope.data_ptr(), intercept.data_ptr(), *_strides(slope, 1), *_strides(intercept, 1)),
        )
    value = _row_by_row(bias.dense().expand(-1, -1, call.queries, call.keys), torch.float32, held)
    return Dense(value.data_ptr(), _strides(value, 3))


def _table(bias: DistanceBias, held: Held) -> Table:
    entries = _row_by_row(bias.table, torch.float32, held)
    query, key = (_row_by_row(x, torch.int64, held) for x in (bias.query, bias.key))
    return Table(
        *(entries.data_ptr(), *_strides(entries, 1), entries.shape[1], bias.first),
        *(query.data_ptr(), key.data_ptr(), _strides(query, 2), *_strides(key, 1)),
    )


def _levels(bias: LevelBias, held: Held) -> Levels:
    slope, step = _in_float32(bias.slope, held), bias.step
    of_slope = (slope.data_ptr(), _strides(slope, 3), CURVES[bias.curve])
    if step is not None and step.dtype != torch.float64:
        step = _in_float32(step, held)
        return Levels(*of_slope, None, None, (), (), step.data_ptr(), _strides(step, 3), bias.start)
    bias = bias.summed()
    query, key = bias.query_level, bias.key_level
    assert query is not None and key is not None
    if bias.query_rest is not None and bias.key_rest is not None:
        query, key = query.double() + bias.query_rest, key.double() + bias.key_rest
    query, key = (_row_by_row(x, torch.float64, held) for x in (query, key))
    return Levels(*of_slope, query.data_ptr(), key.data_ptr(), _strides(query, 3), _strides(key, 2))


def _add_masks(decode: Decode, call: AttentionCall, held: Held) -> None:
    layout, bands = call.layout, call.visibility.bands
    if layout.key_mask is not None:
        mask = _row_by_row(layout.key_mask, torch.bool, held)
        decode.key_mask, (decode.key_mask_stride,) = mask.data_ptr(), _strides(mask, 1)
    if layout.query_documents is not None and layout.key_documents is not None:
        query, key = (_row_by_row(x, torch.int64, held) for x in (layout.query_documents, layout.key_documents))
        decode.query_documents, decode.query_document_strides = query.data_ptr(), _strides(query, 2)
        decode.key_documents, (decode.key_document_stride,) = key.data_ptr(), _strides(key, 1)
    if bands:
        query, key = (_row_by_row(x, torch.int64, held) for x in layout.indices())
        decode.query_index, decode.query_index_strides = query.data_ptr(), _strides(query, 2)
        decode.key_index, (decode.key_index_stride,) = key.data_ptr(), _strides(key, 1)
        ends = [[_bounded(x) for x in (band.nearest, band.farthest, band.first, band.chunk)] for band in bands]
        array = (KeyBand * len(bands))(*map(tuple, ends))
        decode.bands, decode.band_count = ctypes.addressof(array), len(bands)
        held.append(array)


def _bounded(number: int | None) -> int:
    """So small that products of two fit; no end is far away."""
    return FAR if number is None else max(-FAR, min(number, FAR))


def _channels_together(x: Tensor) -> Tensor:
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


def _in_float32(x: Tensor, held: Held) -> Tensor:
    x = x if x.dtype == torch.float32 else x.float()
    held.append(x)
    return x


def _strides(x: Tensor, axes: int) -> tuple[int, ...]:
    """The strides of the first axes, 0 where there is one for all: every stride that the kernel is given."""
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape[:axes], x.stride(), strict=False)])
