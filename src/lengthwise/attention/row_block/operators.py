"""The two operators of torch.library, forward and backward: tensors and plain values in, tensors out.

A compiled or exported graph shows each as one node, so what is inside may look at the data. Their first derivative is
all there is; a second one is refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.operation import run_backward, run_forward
from lengthwise.bias import TILES, Bias, DenseBias, DistanceBias, FunctionBias, LevelBias, at_least_float32


class Plain(NamedTuple):
    """What of a call is not a tensor. `function` is the registered name of a tile function, or empty."""

    kind: str
    function: str
    first: int
    causal: bool
    window: int | None
    scale: float
    start: int
    skip: bool


class Masks(NamedTuple):
    """The tensors of a call that never have a gradient; `start` if the call's own is not a plain number."""

    key_mask: Tensor | None
    documents: Tensor | None
    start: Tensor | None


def attend(call: Call, *, skip: bool) -> Tensor:
    """The output in float32 or better, with gradients."""
    kind, first, tensors = _taken_apart(call.bias)
    function = ""
    if isinstance(call.bias, FunctionBias):
        function = registered_name(call.bias.function)
        if not function:
            return _Unregistered.apply(call, skip, call.q, call.k, call.v, *tensors)
    start, slot = (0, call.start) if isinstance(call.start, Tensor) else (call.start, None)
    masks = Masks(call.key_mask, call.documents, slot)
    plain = Plain(kind, function, first, call.causal, call.window, call.scale, start, skip)
    out: Tensor = _forward(call.q, call.k, call.v, tensors, *masks, *plain)[0]
    return out


def registered_name(function: Callable[..., Tensor]) -> str:
    """The name under which a tile function is registered, or nothing; by identity, which Dynamo can follow."""
    for name, known in TILES.items():
        if known is function:
            return name
    return ""


def _taken_apart(bias: Bias | None) -> tuple[str, int, list[Tensor]]:
    """A bias as plain values: its kind, the first distance, its tensors."""
    match bias:
        case None:
            return "none", 0, []
        case DistanceBias():
            return "distance", bias.first, [bias.table, bias.query, bias.key]
        case FunctionBias():
            return "function", 0, list(bias.tensors)
        case _:
            return "level" if isinstance(bias, LevelBias) else "dense", 0, list(bias.sources)


def _put_together(tensors: list[Tensor], plain: Plain) -> Bias | None:
    """The bias that `_taken_apart` took apart."""
    match plain.kind:
        case "none":
            return None
        case "distance":
            table, query, key = tensors
            return DistanceBias(table, query, key, plain.first)
        case "level":
            return LevelBias(*tensors)
        case "dense":
            return DenseBias(*tensors)
        case _:
            return FunctionBias(TILES[plain.function], tuple(tensors))


def _call(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], masks: Masks, plain: Plain) -> Call:
    return Call(
        q,
        k,
        v,
        bias=_put_together(tensors, plain),
        rescore=None,
        causal=plain.causal,
        key_mask=masks.key_mask,
        documents=masks.documents,
        window=plain.window,
        scale=plain.scale,
        start=plain.start if masks.start is None else int(masks.start),
    )


# An operator's schema is made of its signature, so both spell out what Masks and Plain hold.
@torch.library.custom_op("lengthwise::row_block", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    key_mask: Tensor | None,
    documents: Tensor | None,
    slot: Tensor | None,
    kind: str,
    function: str,
    first: int,
    causal: bool,
    window: int | None,
    scale: float,
    start: int,
    skip: bool,
) -> tuple[Tensor, Tensor]:
    """The output in float32 or better, and the log-sum-exp of every row."""
    plain = Plain(kind, function, first, causal, window, scale, start, skip)
    own = [x.detach() for x in tensors]
    return run_forward(_call(q, k, v, own, Masks(key_mask, documents, slot), plain), skip=skip)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(q).dtype
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("lengthwise::row_block_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    learned: list[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    key_mask: Tensor | None,
    documents: Tensor | None,
    slot: Tensor | None,
    kind: str,
    function: str,
    first: int,
    causal: bool,
    window: int | None,
    scale: float,
    start: int,
    skip: bool,
) -> list[Tensor]:
    """The gradients of q, k, v and of the tensors that are learned."""
    plain = Plain(kind, function, first, causal, window, scale, start, skip)
    own = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, learned, strict=True)]
    call = _call(q, k, v, own, Masks(key_mask, documents, slot), plain)
    return [x for x in run_backward(call, d_out, out, lse, skip=skip) if x is not None]


@_backward.register_fake
def _(
    _d_out: Tensor,
    _out: Tensor,
    _lse: Tensor,
    learned: list[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    found = [q, k, v, *(x for x, needed in zip(tensors, learned, strict=True) if needed)]
    return [x.new_empty(x.shape) for x in found]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, *rest = inputs
    masks, ctx.plain = rest[: len(Masks._fields)], rest[len(Masks._fields) :]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, q, k, v, *masks, *tensors)
    ctx.learned = [x.requires_grad for x in tensors]


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, key_mask, documents, slot, *tensors = ctx.saved_tensors
    masks = key_mask, documents, slot
    d_q, d_k, d_v, *rest = _backward(d_out, out, lse, ctx.learned, q, k, v, tensors, *masks, *ctx.plain)
    found = iter(rest)
    of_tensors = [next(found) if needed else None for needed in ctx.learned]
    return d_q, d_k, d_v, of_tensors, *[None] * (len(masks) + len(ctx.plain))


def _refuse(ctx: Any, *grad_outputs: Any) -> NoReturn:
    raise NotImplementedError(
        "row_block's gradients must not be differentiated again; a second derivative was asked for. "
        'Use backend="reference" for that call.'
    )


_forward.register_autograd(_gradients, setup_context=_save)
_backward.register_autograd(_refuse)


class _Unregistered(torch.autograd.Function):
    """The same for a tile function without a registered name, which only eager mode can hold on to."""

    @staticmethod
    def forward(ctx: Any, call: Call, skip: bool, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        out, lse = run_forward(call, skip=skip)
        ctx.save_for_backward(out, lse, q, k, v, *tensors)
        ctx.call, ctx.skip = call, skip
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        return None, None, *_UnregisteredBackward.apply(ctx.call, ctx.skip, d_out, *ctx.saved_tensors)


class _UnregisteredBackward(torch.autograd.Function):
    """Its gradients; q, k, v and the tensors are arguments so that a second derivative finds its way here."""

    @staticmethod
    def forward(
        _ctx: Any, call: Call, skip: bool, d_out: Tensor, out: Tensor, lse: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        return tuple(run_backward(call, d_out, out, lse, skip=skip))

    backward = staticmethod(_refuse)
