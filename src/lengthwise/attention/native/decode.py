"""A few queries against many keys, as in decoding: one pass over the cache where it lies, the bias made on the way."""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention import reference
from lengthwise.attention.call import Call
from lengthwise.attention.native import build
from lengthwise.attention.row_block.few_rows import FEW
from lengthwise.bias import DistanceBias, LevelBias, LineBias, StepBias

PRECISIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NONE, TABLE, LEVEL, LINE, STEP, ROW = range(6)


def suits(call: Call) -> bool:
    """Whether the rows are so few that keys and values are best read once, where they lie."""
    if torch.compiler.is_compiling():  # a graph of any length must not ask for it
        return False
    return call.queries <= FEW and call.q.device.type == "cpu" and not call.needs_grad


class Record(ctypes.Structure):
    """few_rows.cpp's FewRows, field by field."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("batch", "heads", "group", "queries", "keys", "dim", "value", "precision")),
        *((n, ctypes.c_int64) for n in ("causal", "window", "start", "threads")),
        *((f"{x}_stride_{axis}", ctypes.c_int64) for x in "qkv" for axis in range(3)),
        *((n, ctypes.c_void_p) for n in ("q", "k", "v", "out")),
        ("scale", ctypes.c_double),
        ("kind", ctypes.c_int64),
        ("key_mask", ctypes.c_void_p),
        ("key_mask_stride", ctypes.c_int64),
        ("documents", ctypes.c_void_p),
        ("documents_stride", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("table_stride", "table_length", "first")),
        *((n, ctypes.c_void_p) for n in ("query", "key")),
        *((n, ctypes.c_int64) for n in ("query_stride", "key_stride")),
        *((n, ctypes.c_void_p) for n in ("factor", "knots", "line_slope", "line_start")),
        *((n, ctypes.c_int64) for n in ("factor_stride", "knot_count")),
        *((n, ctypes.c_void_p) for n in ("query_level", "key_level")),
        *((n, ctypes.c_int64 * 2) for n in ("query_level_strides", "key_level_strides")),
        ("step", ctypes.c_void_p),
        ("step_strides", ctypes.c_int64 * 3),
        ("slope", ctypes.c_void_p),
        ("slope_strides", ctypes.c_int64 * 3),
        ("row", ctypes.c_void_p),
        ("row_strides", ctypes.c_int64 * 3),
    ]


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output; what is not finite is left to the reference, which keeps it to the rows that may see it."""
    q, k, v = (_rows(x) for x in (call.q, call.k, call.v))
    out = q.new_empty(call.batch, call.heads, call.queries, v.shape[3], dtype=torch.float32)
    record = Record(
        *(call.batch, call.heads, call.group, call.queries, call.keys, q.shape[3], v.shape[3], PRECISIONS[q.dtype]),
        *(call.causal, call.window or 0, int(call.start), torch.get_num_threads()),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        call.scale,
    )
    # Everything that the kernel reads is held until it is done.
    held = [q, k, v, *_describe_masks(record, call), *_describe_bias(record, call)]
    good = build.library().lengthwise_few_rows(ctypes.byref(record))
    del held
    if not good:
        return reference.attend(call)
    return out if call.dtype == torch.float32 else out.to(call.dtype)


def _describe_masks(record: Record, call: Call) -> list[Tensor]:
    held = []
    for name, mask in (("key_mask", call.key_mask), ("documents", call.documents)):
        if mask is not None:
            mask = _laid(mask, torch.bool if name == "key_mask" else torch.int64)
            setattr(record, name, mask.data_ptr())
            setattr(record, f"{name}_stride", _spread(mask, 1)[0])
            held.append(mask)
    return held


def _describe_bias(record: Record, call: Call) -> list[Tensor]:
    bias = call.in_lines().bias
    if bias is None:
        return []
    if isinstance(bias, DistanceBias):
        record.kind = TABLE
        return _describe_table(record, bias)
    if isinstance(bias, LineBias):
        parts = [_laid(x).contiguous() for x in (bias.factor, bias.knots, bias.slope, bias.intercept)]
        record.kind, record.factor_stride, record.knot_count = LINE, _spread(parts[0], 1)[0], parts[1].shape[0]
        record.factor, record.knots, record.line_slope, record.line_start = (x.data_ptr() for x in parts)
        return [*parts, *_describe_table(record, bias.curve)]
    if isinstance(bias, LevelBias):
        slope = _laid(bias.slope)
        record.slope, record.slope_strides = slope.data_ptr(), _spread(slope, 3)
        if isinstance(bias, StepBias) and bias.queries_last and bias.step.dtype == torch.float32:
            record.kind, record.step, record.step_strides = STEP, bias.step.data_ptr(), bias.step.stride()
            return [bias.step, slope]
        query, key = (_laid(x, torch.float64) for x in (bias.query_level, bias.key_level))
        record.kind = LEVEL
        record.query_level, record.query_level_strides = query.data_ptr(), _spread(query, 2)
        record.key_level, record.key_level_strides = key.data_ptr(), _spread(key, 2)
        return [query, key, slope]
    row = _laid(bias.dense())
    record.kind, record.row, record.row_strides = ROW, row.data_ptr(), _spread(row, 3)
    return [row]


def _describe_table(record: Record, bias: DistanceBias) -> list[Tensor]:
    table, query, key = _laid(bias.table), _laid(bias.query, torch.int64), _laid(bias.key, torch.int64)
    record.table, record.table_stride, record.table_length = table.data_ptr(), _spread(table, 1)[0], table.shape[1]
    record.query, record.key, record.first = query.data_ptr(), key.data_ptr(), bias.first
    record.query_stride, record.key_stride = _spread(query, 1)[0], _spread(key, 1)[0]
    return [table, query, key]


def _rows(x: Tensor) -> Tensor:
    """As it is if the kernel has its precision and its channels lie side by side."""
    known = x.dtype in PRECISIONS and (x.dtype != torch.float16 or build.library().lengthwise_takes_half())
    return _laid(x, x.dtype if known else torch.float32)


def _laid(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """In a precision, with the last axis contiguous: as it is, if it can be."""
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _spread(x: Tensor, axes: int) -> tuple[int, ...]:
    """The strides of the first axes, 0 where there is one for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:axes], x.stride()[:axes], strict=True))
