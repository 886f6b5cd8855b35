"""Attention in tiles of rows and keys, forward and backward: the Python side of tiles.cpp.

It takes biases that are one number per distance (up to any number of tables, which add up to one strip), levels of
tokens, straight lines, profiles that tokens mix, and sums of them; and masks that leave every query a few intervals of
keys, with padding anywhere. A plan holds whatever the kernel reads but q, k and v. What the backward pass reads again
is saved for it as tensors, so that checkpointing and offloading see all of it, and nothing else outlives the forward
pass.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native import build
from lengthwise.attention.native.intervals import visible_intervals
from lengthwise.attention.native.padding import padded, padded_size
from lengthwise.attention.native.tile_terms import (
    LINE,
    PROFILE,
    TERM_ARRAYS,
    TERMS,
    Tensors,
    Term,
    TermRecord,
    terms_of,
)

COUNTS = (
    *("batch", "heads", "group", "queries", "keys", "dim", "value", "start"),
    *("bands", "mask_batches", "skip", "threads", "term_count"),
)
ARRAYS = (
    *("q", "k", "v", "low", "high", "key_mask", "logit_scale", "sink", "out", "lse", "peak", "log_total"),
    *("d_out", "d_lse", "d_q", "d_k", "d_v", "d_logit_scale", "d_sink", "visited"),
)


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
        tensors = self.tensors | {name: padded(x.detach()) for name, x in (("q", q), ("k", k), ("v", v))}
        shape = tensors["q"].shape[:3]
        tensors["out"] = tensors["q"].new_empty(*shape, tensors["v"].shape[3])
        tensors |= {name: tensors["q"].new_empty(shape) for name in ("lse", "peak", "log_total")}
        tensors["visited"] = torch.zeros(shape[:2], dtype=torch.int64)
        self.problem.run("lengthwise_forward", tensors)
        return tensors


def plan(call: AttentionCall) -> TilesPlan | Refusal:
    """What the kernel needs, or why it cannot take the call."""
    call = call.with_known_start()
    masks = visible_intervals(call)
    if isinstance(masks, Refusal):
        return masks
    terms = terms_of(call)
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
        "dim": padded_size(call.q.shape[3]),
        "value": padded_size(call.v.shape[3]),
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
    upstream = {"d_out": torch.zeros_like(tensors["out"]) if d_out is None else padded(d_out.detach())}
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
