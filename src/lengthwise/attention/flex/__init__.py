"""FlexAttention: one function per kind of bias, compiled by torch into one fused kernel.

Made for CUDA, where it also trains; untested there. On the CPU torch compiles its forward pass only, without the
log-sum-exp. entries.py has the functions, masks.py the mask by blocks, lookups.py what both look up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.flex.entries import ENTRIES
from lengthwise.attention.flex.lookups import per_head
from lengthwise.attention.flex.masks import block_mask
from lengthwise.bias import Bias, QueryDistanceBias, at_least_float32, flat_terms

KERNELS = 1024
"""Every kind of bias, mask and room is a kernel of its own; past dynamo's own limit it would fall back unseen."""

NARROWEST = 16
"""Fewer channels than that inductor refuses where it writes Triton."""


@dataclass(frozen=True)
class FlexPlan(Plan):
    """The terms of the bias, which are added one after the other."""

    terms: tuple[Bias, ...]


def plan(call: AttentionCall) -> FlexPlan | Refusal:
    """Everything that can be said of one query and one key."""
    terms = tuple(flat_terms(call.bias))
    reasons = [
        f"a {type(term).__name__} is computed tile by tile, flex asks for one score at a time"
        for term in terms
        if type(term) not in ENTRIES
    ]
    if call.rescore is not None:
        reasons.append("rescore needs whole rows of all heads, flex shows one score at a time")
    if call.dtype == torch.float64:
        reasons.append("FlexAttention has no float64 kernel")
    if 0 in call.q.shape or 0 in call.v.shape:
        reasons.append("FlexAttention needs a query and a key")
    if call.q.device.type == "meta":
        reasons.append("FlexAttention has no kernel for tensors without numbers")
    if call.q.device.type != "cpu":
        if (width := min(call.q.shape[3], call.v.shape[3])) < NARROWEST:
            reasons.append(f"FlexAttention takes heads of {NARROWEST} channels or more off the CPU, got {width}")
        if call.needs_grad and any(_reads_learned_twice(term) for term in terms):
            reasons.append(
                "FlexAttention gives no gradient to what a score reads more than once, as to several profiles"
            )
    if call.q.device.type == "cpu":
        if call.needs_grad:
            reasons.append("FlexAttention has no backward pass on the CPU")
        if call.q.shape[3] != call.v.shape[3]:
            reasons.append("FlexAttention on the CPU wants values as wide as queries")
        if call.return_lse or call.sink is not None:
            reasons.append("FlexAttention does not give the log-sum-exp on the CPU, which a sink needs too")
    return Refusal(tuple(reasons)) if reasons else FlexPlan(terms)


def _reads_learned_twice(term: Bias) -> bool:
    return isinstance(term, QueryDistanceBias) and term.needs_grad and term.profiles.shape[1] > 1


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp; scores are float32 inside the kernel whatever the dtype."""
    assert isinstance(plan, FlexPlan)
    clean, taint = finite_inputs(call)
    wants_lse = call.return_lse or call.sink is not None
    found = _attention(
        clean.q,
        clean.k,
        clean.v,
        score_mod=_score(call, plan.terms),
        block_mask=block_mask(call) if call.visibility.hides else None,
        scale=call.scale,
        enable_gqa=call.group > 1,
        return_aux=AuxRequest(lse=True) if wants_lse else None,
    )
    out, lse = (found[0], found[1].lse) if wants_lse else (found, None)
    if call.sink is not None:
        assert lse is not None
        sink = at_least_float32(call.sink)
        share = (lse - sink).masked_fill(lse == -torch.inf, -torch.inf).sigmoid()
        out, lse = (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)
    if taint is not None:
        out, lse = out + taint[..., None].to(out.dtype), None if lse is None else lse + taint
    return out, lse


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": KERNELS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        return _kernel()(q, k, v, **options)


@cache
def _kernel() -> Callable[..., Any]:
    """flex_attention compiled for any length; uncompiled it fills in the whole matrix."""
    return torch.compile(flex_attention, dynamic=True)


def _score(call: AttentionCall, terms: tuple[Bias, ...]) -> Callable[..., Tensor] | None:
    """logit_scale (softcap(content) + bias); None where it is the content."""
    if not terms and call.softcap is None and call.logit_scale is None:
        return None
    entries = tuple(ENTRIES[type(term)](term, call) for term in terms)
    softcap = None if call.softcap is None else torch.full((), call.softcap, dtype=torch.float32, device=call.q.device)
    factor = None if call.logit_scale is None else per_head(at_least_float32(call.logit_scale), call)

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            content = softcap * torch.tanh(content / softcap)
        for entry in entries:
            content = content + entry(b, h, i, j)
        return content if factor is None else content * factor[b, h, i]

    return score
