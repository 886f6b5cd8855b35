"""The two operators of torch.library that a backend has, forward and backward: tensors and plain values to tensors.

A compiled or exported graph shows each as one node, so what is inside may look at the data. A call goes through them
taken apart: its tensors in a list, its integers in another, because a graph with open lengths does not know them, and
the names of both with all that is plain in one string of JSON. Beside the call go notes, integers by name that the
backend's plan worked out. Their first derivative is all there is; a second one is refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lengthwise.attention.backend import Output
from lengthwise.attention.call import AttentionCall, is_skipping
from lengthwise.bias import at_least_float32, rebuild, registered_name
from lengthwise.token_layout import Band, TokenLayout
from lengthwise.visibility import Visibility

# Operators are known to all of torch by name, so the copy of this file in an exported model has a name of its own.
NAMESPACE = "lengthwise" if __name__.startswith("lengthwise.") else re.sub(r"\W", "_", __name__)

LAYOUT = ("query_documents", "key_documents", "key_mask", "mask", "query_index", "key_index")
"""What of a layout masks; positions are a bias's own business."""

BAND = ("nearest", "farthest", "first", "chunk")


class Parts(NamedTuple):
    """A call taken apart: everything by name but q, k, v and two numbers that may be unknown to a graph."""

    tensors: dict[str, Tensor]
    ints: dict[str, int]
    plain: dict[str, Any]


Notes = Mapping[str, int]
"""What a plan worked out beside the call."""

Forward = Callable[[AttentionCall, Notes], tuple[Tensor, Tensor]]
"""The output and the log-sum-exp, in float32 or better."""

Backward = Callable[[AttentionCall, Notes, Tensor, Tensor, Tensor, Tensor], Mapping[str, Tensor]]
"""The gradients of q, k and v and of what else is learned, by name, from d_out, d_lse, out and lse."""


@dataclass(frozen=True)
class Operators:
    """A backend's pair, and the functions inside."""

    backend: str
    forward: Forward
    backward: Backward
    operator: Any
    """The forward operator."""


def attend(operators: Operators, call: AttentionCall, notes: Notes | None = None) -> Output:
    """The output and the log-sum-exp, with gradients."""
    nameless = bool(nameless_functions(call))
    parts = _take_apart(call, named=not nameless, notes=notes or {})
    tensors, numbers = list(parts.tensors.values()), list(parts.ints.values())
    if nameless:
        names = tuple(parts.tensors)
        given = _Given(operators, names, parts.ints, parts.plain, call.scale, call.softcap)
        out, lse = _Eager.apply(given, call.q, call.k, call.v, *tensors)
    else:
        text = _to_text(list(parts.tensors), list(parts.ints), parts.plain)
        out, lse = operators.operator(call.q, call.k, call.v, tensors, numbers, call.scale, call.softcap, text)
    return out.to(call.dtype), lse if call.return_lse else None


def nameless_functions(call: AttentionCall) -> list[Callable[..., Any]]:
    """The functions of a call that no graph can name."""
    parts = [part for part in (call.bias, call.rescore) if part is not None]
    values = [value for part in parts for value in part.plain().values()]
    return [value for value in values if callable(value) and not registered_name(value)]


def _take_apart(call: AttentionCall, *, named: bool, notes: Notes) -> Parts:
    layout, visibility = call.layout, call.visibility
    tensors = {name: x for name, x in call.tensors().items() if name not in ("q", "k", "v")}
    tensors |= {f"layout.{name}": x for name in LAYOUT if (x := getattr(layout, name)) is not None}
    static: dict[str, Any] = {"causal": layout.causal, "skip": call.skip, "key_start": layout.key_start}
    if isinstance(layout.query_start, Tensor):
        tensors["layout.query_start"] = layout.query_start
    else:
        static["query_start"] = layout.query_start
    if visibility.window is not None:
        static["window"] = visibility.window
    for i, band in enumerate(visibility.bands):
        sides = {name: getattr(band, name) for name in BAND}
        static |= {f"band.{i}.{name}": side for name, side in sides.items() if side is not None}
    for what, part in (("bias", call.bias), ("rescore", call.rescore)):
        if part is not None:
            static[f"{what}.kind"] = type(part).__name__
            own = part.static() if named else part.plain()
            static |= {f"{what}.{name}": value for name, value in own.items()}
    static |= {f"note.{name}": value for name, value in notes.items()}
    ints = {name: value for name, value in static.items() if _is_int(value)}
    return Parts(tensors, ints, {name: value for name, value in static.items() if name not in ints})


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _put_together(
    q: Tensor, k: Tensor, v: Tensor, parts: Parts, scale: float, softcap: float | None
) -> tuple[AttentionCall, Notes]:
    """The call that was taken apart, and the notes beside it."""
    tensors, static = parts.tensors, parts.ints | parts.plain
    masks: dict[str, Any] = {name: tensors[f"layout.{name}"] for name in LAYOUT if f"layout.{name}" in tensors}
    start = tensors["layout.query_start"] if "layout.query_start" in tensors else static["query_start"]
    query, key = (torch.arange(x.shape[2], device=x.device)[None] for x in (q, k))
    layout = TokenLayout(query, key, query_start=start, key_start=static["key_start"], causal=static["causal"], **masks)
    bands: list[Band] = []
    while f"band.{len(bands)}.nearest" in static:
        bands.append(Band(**_under(f"band.{len(bands)}", static)))
    described = {
        what: rebuild(static[f"{what}.kind"], _under(what, tensors), _under(what, static))
        for what in ("bias", "rescore")
        if f"{what}.kind" in static
    }
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        visibility=Visibility(layout, static.get("window"), tuple(bands)),
        bias=described.get("bias"),
        rescore=described.get("rescore"),
        scale=scale,
        softcap=softcap,
        logit_scale=tensors.get("logit_scale"),
        sink=tensors.get("sink"),
        return_lse=True,
        skip=static["skip"] and is_skipping(),
    )
    return call, _under("note", static)


def _under(prefix: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under a name, but for the kind that the name itself has."""
    own = {name[len(prefix) + 1 :]: part for name, part in parts.items() if name.startswith(f"{prefix}.")}
    own.pop("kind", None)
    return own


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _to_text(tensors: list[str], ints: list[str], plain: dict[str, Any]) -> str:
    """Names and plain values as JSON; Dynamo cannot look into the writer of JSON, and need not: all is constant."""
    return json.dumps({"tensors": tensors, "ints": ints, "plain": plain})


def _from_text(text: str, tensors: list[Tensor], numbers: list[int]) -> Parts:
    names = json.loads(text)
    by_name = dict(zip(names["tensors"], tensors, strict=True))
    return Parts(by_name, dict(zip(names["ints"], numbers, strict=True)), names["plain"])


def operators(backend: str, forward: Forward, backward: Backward) -> Operators:
    """Register a backend's operators; once, since torch knows them by name."""

    @torch.library.custom_op(f"{NAMESPACE}::{backend}", mutates_args=())
    def forward_operator(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: list[Tensor],
        numbers: list[int],
        scale: float,
        softcap: float | None,
        text: str,
    ) -> tuple[Tensor, Tensor]:
        parts = _from_text(text, [x.detach() for x in tensors], numbers)
        return forward(*_put_together(q, k, v, parts, scale, softcap))

    @forward_operator.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        dtype = at_least_float32(q).dtype
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)

    @torch.library.custom_op(f"{NAMESPACE}::{backend}_backward", mutates_args=())
    def backward_operator(
        d_out: Tensor,
        d_lse: Tensor,
        out: Tensor,
        lse: Tensor,
        learned: list[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: list[Tensor],
        numbers: list[int],
        scale: float,
        softcap: float | None,
        text: str,
    ) -> list[Tensor]:
        own = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, learned, strict=True)]
        parts = _from_text(text, own, numbers)
        call, notes = _put_together(q, k, v, parts, scale, softcap)
        return _gradients_in_order(parts, backward(call, notes, d_out, d_lse, out, lse))

    @backward_operator.register_fake
    def _(
        _d_out: Tensor,
        _d_lse: Tensor,
        _out: Tensor,
        _lse: Tensor,
        learned: list[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: list[Tensor],
        *_: Any,
    ) -> list[Tensor]:
        sources = [q, k, v, *(x for x, needed in zip(tensors, learned, strict=True) if needed)]
        return [x.new_empty(x.shape) for x in sources]

    def gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        out, lse, q, k, v, *tensors = ctx.saved_tensors
        d_q, d_k, d_v, *others = backward_operator(d_out, d_lse, out, lse, ctx.learned, q, k, v, tensors, *ctx.rest)
        remaining = iter(others)
        of_tensors = [next(remaining) if needed else None for needed in ctx.learned]
        return d_q, d_k, d_v, of_tensors, *[None] * len(ctx.rest)

    def refuse(ctx: Any, *grad_outputs: Any) -> NoReturn:
        _refuse(backend)

    forward_operator.register_autograd(gradients, setup_context=_save)
    backward_operator.register_autograd(refuse)
    return Operators(backend, forward, backward, forward_operator)


def _gradients_in_order(parts: Parts, gradients: Mapping[str, Tensor]) -> list[Tensor]:
    names = ["q", "k", "v", *(name for name, x in parts.tensors.items() if x.requires_grad)]
    # An operator promises its strides, whatever those of its arguments are.
    return [gradients[name].contiguous() for name in names]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, q, k, v, *tensors)
    ctx.learned = [x.requires_grad for x in tensors]


def _refuse(backend: str) -> NoReturn:
    raise NotImplementedError(
        f"{backend}'s gradients must not be differentiated again; a second derivative was asked for. "
        'Use backend="reference" for that call.'
    )


class _Given(NamedTuple):
    """What the eager road knows beside tensors: functions as they are."""

    operators: Operators
    names: tuple[str, ...]
    ints: dict[str, int]
    plain: dict[str, Any]
    scale: float
    softcap: float | None

    def parts(self, tensors: tuple[Tensor, ...]) -> Parts:
        return Parts(dict(zip(self.names, tensors, strict=True)), self.ints, self.plain)


class _Eager(torch.autograd.Function):
    """The same for functions without a registered name, which only eager mode can hold on to."""

    @staticmethod
    def forward(ctx: Any, given: _Given, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.given, ctx.learned = given, [x.requires_grad for x in tensors]
        parts = given.parts(tuple(x.detach() for x in tensors))
        out, lse = given.operators.forward(*_put_together(q, k, v, parts, given.scale, given.softcap))
        ctx.save_for_backward(out, lse, q, k, v, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        d_q, d_k, d_v, *others = _EagerBackward.apply(ctx.given, ctx.learned, d_out, d_lse, *ctx.saved_tensors)
        remaining = iter(others)
        return None, d_q, d_k, d_v, *(next(remaining) if needed else None for needed in ctx.learned)


class _EagerBackward(torch.autograd.Function):
    """Its gradients; q, k, v and the tensors are arguments so that a second derivative finds its way here."""

    @staticmethod
    def forward(
        ctx: Any,
        given: _Given,
        learned: list[bool],
        d_out: Tensor,
        d_lse: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.backend = given.operators.backend
        own = tuple(x.detach().requires_grad_(needed) for x, needed in zip(tensors, learned, strict=True))
        parts = given.parts(own)
        call, notes = _put_together(q.detach(), k.detach(), v.detach(), parts, given.scale, given.softcap)
        return tuple(_gradients_in_order(parts, given.operators.backward(call, notes, d_out, d_lse, out, lse)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        _refuse(ctx.backend)
