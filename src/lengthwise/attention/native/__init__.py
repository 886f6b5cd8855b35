"""The same tiles as row_block in one C++ kernel, compiled on first use where there is a compiler: CPU, eager mode.

It takes the kinds whose bias is one number per distance or per token, and masks that leave every query an interval of
keys: causality, windows, padding at the ends, packed documents. A few queries against many keys, as in decoding, have
a kernel of their own, which takes every kind and every mask. Everything else is row_block's.
"""

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention import row_block
from lengthwise.attention.call import Call
from lengthwise.attention.native import build, few_rows
from lengthwise.attention.native.problem import (
    KINDS,
    LINES,
    Problem,
    by_distance,
    holes,
    make_problem,
    padded,
    strip_columns,
)
from lengthwise.attention.row_block.distance_terms import slot_offsets
from lengthwise.attention.row_block.visible import Visible
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    if torch.compiler.is_compiling():
        return ["a compiled graph takes row_block, which it sees as one node"]
    if call.q.device.type != "cpu":
        return ["its kernel is for the CPU"]
    if call.dtype == torch.float64:
        return ["its kernel computes in float32"]
    if call.rescore is not None:
        return ["rescore replaces the scores, which its kernel never shows"]
    if few_rows.suits(call):
        return [f"there is no kernel here: {build.fault()}"] if build.fault() else []
    call = call.in_lines()
    if type(call.bias) not in KINDS or (isinstance(call.bias, LineBias) and call.bias.slope.shape[1] > LINES):
        return [
            f"it knows tables of distances, levels of tokens and up to {LINES} straight lines, and other kinds for a "
            "few queries only"
        ]
    if holes(call):
        return ["padding or documents leave a query more than one interval of keys"]
    if (table := by_distance(call.bias)) is not None and slot_offsets(table, Visible(call)) is None:
        return ["positions have gaps, so that distances do not follow the slots"]
    if fault := build.fault():
        return [f"there is no kernel here: {fault}"]
    return []


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, with gradients for everything that is learned."""
    if few_rows.suits(call):
        return few_rows.attend(call)
    call = call.in_lines()
    clean, taint = call.contained() if call.forbids and not call.is_seen_finite else (call, None)
    if call.needs_grad:
        sources = () if call.bias is None else call.bias.sources
        out = _Attention.apply(clean, row_block.skips(), clean.q, clean.k, clean.v, *sources)
    else:
        found = _forward(clean, skip=row_block.skips())["out"]
        out = found[..., : call.v.shape[3]].to(call.dtype).contiguous()
    return out if taint is None else out + taint


def skipped_share(call: Call) -> float:
    """How much of the work that the masks leave is left out, 0 to 1; a few queries read every key."""
    if few_rows.suits(call):
        return 0.0
    visited = [_forward(call.in_lines(), skip=skip)["visited"].sum() for skip in (True, False)]
    return 1 - float(visited[0]) / max(1, int(visited[1]))


def _run(problem: Problem, function: str) -> None:
    getattr(build.library(), function)(ctypes.byref(problem.record()))


def _problem(call: Call, *, learned: bool, skip: bool) -> Problem:
    q, k, v = (padded(x.detach()) for x in (call.q, call.k, call.v))
    return make_problem(call, q, k, v, learned=learned, skip=skip)


def _forward(call: Call, *, skip: bool) -> dict[str, Tensor]:
    problem = _problem(call, learned=False, skip=skip)
    q, v = problem.arrays["q"], problem.arrays["v"]
    found = {
        "out": q.new_empty(*q.shape[:3], v.shape[3]),
        "lse": q.new_empty(q.shape[:3]),
        "visited": torch.zeros(q.shape[:2], dtype=torch.int64),
    }
    problem.arrays |= found
    _run(problem, "lengthwise_forward")
    return found


class _Place(int):
    """Where in a list a tensor was put."""


def _take_apart(part: Any, tensors: list[Tensor]) -> Any:
    """A call or a bias without its tensors, which are added to a list, each once."""
    if isinstance(part, Tensor):
        if not any(part is tensor for tensor in tensors):
            tensors.append(part)
        return _Place(next(n for n, tensor in enumerate(tensors) if tensor is part))
    return _copy_with(part, lambda x: _take_apart(x, tensors))


def _put_together(part: Any, tensors: Sequence[Tensor]) -> Any:
    """What was taken apart, with these tensors in their places."""
    return tensors[part] if isinstance(part, _Place) else _copy_with(part, lambda x: _put_together(x, tensors))


def _copy_with(part: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(part, Call | Bias):
        return part
    found = copy(part)
    vars(found).update({name: change(value) for name, value in vars(part).items()})
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, skip: bool, q: Tensor, k: Tensor, v: Tensor, *sources: Tensor) -> Tensor:
        found = _forward(call, skip=skip)
        # Saved by torch and not held here: checkpoints and offloading put away what torch saves, and only that.
        saved = [found["out"], found["lse"]]
        ctx.call, ctx.skip = _take_apart(call, saved), skip
        ctx.save_for_backward(*saved)
        # A copy: backward the kernel reads its output again, which the caller may have changed in place by then.
        return found["out"][..., : v.shape[3]].to(q.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        # Not torch's once_differentiable: torch.autograd.grad goes round it and leaves this part out.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "native has no second derivative, got create_graph=True. Use backend='reference' for that call."
            )
        saved = ctx.saved_tensors
        call: Call = _put_together(ctx.call, saved)
        learned = any(ctx.needs_input_grad[5:])
        problem = _problem(call, learned=learned, skip=ctx.skip)
        problem.arrays |= {"out": saved[0], "lse": saved[1]}
        shape = (call.batch, call.heads)
        arrays = problem.arrays
        found = {
            "d_q": torch.zeros_like(arrays["q"]),
            "d_k": arrays["k"].new_zeros(*shape, *arrays["k"].shape[2:]),
            "d_v": arrays["v"].new_zeros(*shape, *arrays["v"].shape[2:]),
        }
        if learned and by_distance(call.bias) is not None:
            found["d_strip"] = arrays["strip"].new_zeros(*shape, arrays["strip"].shape[2])
        if learned and isinstance(call.bias, LineBias):
            found["d_factor"] = arrays["q"].new_zeros(*shape, call.queries)
            found["d_line_slope"], found["d_line_start"] = arrays["q"].new_zeros(2, *shape, call.bias.slope.shape[1])
        elif learned and isinstance(call.bias, LevelBias):
            found["d_slope"] = arrays["q"].new_zeros(*shape, call.queries)
            found["d_query_level"] = torch.zeros(*shape, call.queries, dtype=torch.float64)
            found["d_key_level"] = torch.zeros(*shape, call.keys, dtype=torch.float64)
        problem.arrays |= found | {"d_out": padded(d_out)}
        _run(problem, "lengthwise_backward")
        of_inputs = (("d_q", call.q), ("d_k", call.k), ("d_v", call.v))
        d_q, d_k, d_v = (found[name][..., : x.shape[3]] for name, x in of_inputs)
        if call.group > 1:
            d_k, d_v = (x.unflatten(1, (-1, call.group)).sum(2) for x in (d_k, d_v))
        of_bias = _of_bias(call, found) if learned else [None] * len(ctx.needs_input_grad[5:])
        return None, None, d_q.to(call.dtype), d_k.to(call.dtype), d_v.to(call.dtype), *of_bias


def _of_bias(call: Call, found: dict[str, Tensor]) -> list[Tensor]:
    """The gradients of the bias's sources from what the kernel collected for every sequence and head."""
    bias = call.bias
    if isinstance(bias, DistanceBias):
        return [_of_table(call, bias, found["d_strip"])]
    if isinstance(bias, LineBias):
        d_table = _of_table(call, bias.curve, found["d_strip"].sum(1, keepdim=True))
        d_factor = found["d_factor"].sum(1).sum_to_size(bias.factor.shape)
        of_lines = (found[name].sum(0) for name in ("d_line_slope", "d_line_start"))
        return [d.to(x.dtype) for d, x in zip((d_table, d_factor, *of_lines), bias.sources, strict=True)]
    assert isinstance(bias, LevelBias)
    names = ("d_query_level", "d_key_level", "d_slope")
    return [found[n].sum_to_size(x.shape).to(x.dtype) for n, x in zip(names, bias.sources, strict=True)]


def _of_table(call: Call, bias: DistanceBias, d_strip: Tensor) -> Tensor:
    columns = strip_columns(call, bias)
    d_table = torch.zeros(bias.table.shape)
    for rows, batch in zip(columns, _by(columns.shape[0], d_strip), strict=True):
        d_table.scatter_add_(1, rows.expand(len(d_table), -1), batch)
    return d_table.to(bias.table.dtype)


def _by(batches: int, d_strip: Tensor) -> Tensor:
    """Sequences that share a strip added up."""
    return d_strip.sum(0, keepdim=True) if batches == 1 else d_strip
