"""Exact attention for every kind of bias in tiles, forward and backward: nothing with queries x keys numbers is alive.

Plain PyTorch inside two operators of `torch.library`, which take tensors and plain values only, so that torch.compile
and torch.export see one node each and what is inside may look at the data. Tried on CPU; on other devices untested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block import few_rows, rescoring
from lengthwise.attention.row_block.operation import put_together, run_backward, run_forward, skipped_share, taken_apart
from lengthwise.bias import TILES, DenseBias, DistanceBias, FunctionBias, LevelBias, wide

__all__ = ["attend", "objections", "skipped_share", "skipping"]

_skip = True


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    reasons = []
    if not isinstance(call.bias, (DistanceBias, LevelBias, FunctionBias, DenseBias, type(None))):
        reasons.append(f"it does not know the structure of a {type(call.bias).__name__}")
    if torch.compiler.is_compiling():
        if isinstance(call.bias, FunctionBias) and not _name(call.bias):
            name = call.bias.function.__name__
            reasons.append(f"a compiled graph can only name a registered tile: decorate {name} with registered_tile")
        if call.rescore is not None:
            reasons.append("a compiled graph cannot name the function that rescores")
    return reasons


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, with gradients for everything that is learned."""
    if call.rescore is not None:
        return rescoring.attend(call)
    if few_rows.suits(call):
        return few_rows.attend(call)
    kind, first, tensors = taken_apart(call.bias)
    function = ""
    if isinstance(call.bias, FunctionBias):
        function = _name(call.bias)
        if not function:
            return _Unregistered.apply(call, _skip, call.q, call.k, call.v, *tensors).to(call.dtype)
    number, tensor = (call.start, None) if isinstance(call.start, int) else (0, call.start)
    out, _ = _forward(
        call.q,
        call.k,
        call.v,
        tensors,
        kind,
        function,
        first,
        call.causal,
        call.key_mask,
        call.documents,
        call.window,
        call.scale,
        number,
        tensor,
        _skip,
    )
    return out.to(call.dtype)


@contextmanager
def skipping(on: bool) -> Iterator[None]:
    """Inside, far keys that provably cannot matter are skipped, as by default, or never are."""
    global _skip
    before, _skip = _skip, on
    try:
        yield
    finally:
        _skip = before


def _name(bias: FunctionBias) -> str:
    """The name under which its function is registered, or nothing; looked up by identity, which Dynamo can follow."""
    for name, function in TILES.items():
        if function is bias.function:
            return name
    return ""


@torch.library.custom_op("lengthwise::row_block", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    kind: str,
    function: str,
    first: int,
    causal: bool,
    key_mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    start: int,
    start_tensor: Tensor | None,
    skip: bool,
) -> tuple[Tensor, Tensor]:
    """The output in float32 or better, and the log-sum-exp of every row."""
    bias = put_together(kind, first, [x.detach() for x in tensors], TILES.get(function))
    begin = start if start_tensor is None else int(start_tensor)
    call = Call(q, k, v, bias, None, causal, key_mask, documents, window, scale, begin)
    return run_forward(call, skip=skip)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = wide(q).dtype
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("lengthwise::row_block_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    learned: list[bool],
    kind: str,
    function: str,
    first: int,
    causal: bool,
    key_mask: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    scale: float,
    start: int,
    start_tensor: Tensor | None,
    skip: bool,
) -> list[Tensor]:
    """The gradients of q, k, v and of the tensors that are learned."""
    own = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, learned, strict=True)]
    bias = put_together(kind, first, own, TILES.get(function))
    begin = start if start_tensor is None else int(start_tensor)
    call = Call(q, k, v, bias, None, causal, key_mask, documents, window, scale, begin)
    return [x for x in run_backward(call, d_out, out, lse, skip=skip) if x is not None]


@_backward.register_fake
def _(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    learned: list[bool],
    *_: Any,
) -> list[Tensor]:
    found = [q, k, v, *(x for x, needed in zip(tensors, learned, strict=True) if needed)]
    return [x.new_empty(x.shape) for x in found]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, kind, function, first, causal, key_mask, documents, window, scale, start, start_tensor, skip = (
        inputs
    )
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, k, v, key_mask, documents, start_tensor, *tensors)
    ctx.learned = [x.requires_grad for x in tensors]
    ctx.plain = kind, function, first, causal, window, scale, start, skip


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, key_mask, documents, start_tensor, *tensors = ctx.saved_tensors
    kind, function, first, causal, window, scale, start, skip = ctx.plain
    d_q, d_k, d_v, *rest = _backward(
        d_out,
        out,
        lse,
        q,
        k,
        v,
        tensors,
        ctx.learned,
        kind,
        function,
        first,
        causal,
        key_mask,
        documents,
        window,
        scale,
        start,
        start_tensor,
        skip,
    )
    found = iter(rest)
    return d_q, d_k, d_v, [next(found) if needed else None for needed in ctx.learned], *([None] * 11)


_forward.register_autograd(_gradients, setup_context=_save)


class _Unregistered(torch.autograd.Function):
    """The same for a tile function without a registered name, which only eager mode can hold on to."""

    @staticmethod
    def forward(ctx: Any, call: Call, skip: bool, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        out, lse = run_forward(call, skip=skip)
        ctx.save_for_backward(out, lse, q, k, v, *tensors)
        ctx.call, ctx.skip = call, skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        out, lse, *_ = ctx.saved_tensors
        return None, None, *run_backward(ctx.call, d_out, out, lse, skip=ctx.skip)
