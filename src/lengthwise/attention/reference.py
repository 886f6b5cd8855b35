"""Attention as it is defined, written to be read: every other backend must agree with this one.

content = scale q k^T, capped                   softcap tanh(scale q k^T / softcap); 0 where the mask hides a key
scores  = logit_scale (content + bias)          or logit_scale rescore(content, bias); -inf where hidden
weights = exp(scores - lse)                     lse = log(sum of exp(scores) + exp(sink)): a sink takes weight
out     = weights v                             0 where a row sees nothing and has no sink, and then lse is -inf
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs, memory_refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import at_least_float32

BLOCK = 2**22
"""How many scores are alive at once where rows are explained block by block."""

MATRICES = 4
"""Content, bias, scores and weights are filled in."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What attention computes on the way to its output: per row, and per query and key where it was asked for.

    Hidden places are 0, in `scores` -inf.
    """

    out: Float[Tensor, "batch head query value"]
    lse: Float[Tensor, "batch head query"]
    """The logarithm of a row's denominator."""
    entropy: Float[Tensor, "batch head query"]
    """Of a row's weights, the sink's included, in nats."""
    largest: Float[Tensor, "batch head query"]
    """A row's largest score; -inf if it sees nothing."""
    sink_weight: Float[Tensor, "batch head query"]
    """What the sink takes of a row; 0 without one."""
    content: Float[Tensor, "batch head query key"] | None = None
    bias: Float[Tensor, "batch head query key"] | None = None
    scores: Float[Tensor, "batch head query key"] | None = None
    weights: Float[Tensor, "batch head query key"] | None = None


def plan(call: AttentionCall) -> Plan | Refusal:
    """The reference takes every call that fits into memory."""
    return memory_refusal(call, MATRICES) or Plan()


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp."""
    clean, taint = finite_inputs(call)
    k, v = (of_heads(x, call.group) for x in (clean.k, clean.v))
    *_, scores = score_rows(call, k)
    weights, lse = softmax(scores, sink_of(call))
    out = weights @ v
    if taint is not None:
        out, lse = out + taint[..., None], lse + taint
    return out.to(call.dtype), lse


def explain(call: AttentionCall, *, matrices: bool) -> Explanation:
    """Everything, in float32 or better but for the output; without the matrices in memory linear in length."""
    clean, taint = finite_inputs(call)
    k, v = (of_heads(x, call.group) for x in (clean.k, clean.v))
    size = call.queries if matrices else max(1, BLOCK // max(1, call.batch * call.heads * call.keys))
    blocks = [slice(row, min(row + size, call.queries)) for row in range(0, max(call.queries, 1), max(size, 1))]
    parts = [_explain_rows(call, k, v, rows, taint, matrices=matrices) for rows in blocks]
    whole: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts], 2)
        for name in Explanation.__dataclass_fields__
    }
    return Explanation(**whole)


def _explain_rows(
    call: AttentionCall, k: Tensor, v: Tensor, rows: slice, taint: Tensor | None, *, matrices: bool
) -> Explanation:
    content, bias, scores = score_rows(call, k, rows, exact=True)
    sink = sink_of(call, rows)
    weights, lse = softmax(scores, sink)
    out = weights @ v
    if taint is not None:
        out, lse = out + taint[:, :, rows, None], lse + taint[:, :, rows]
    sink_weight = torch.zeros_like(lse) if sink is None else (sink - lse).exp().where(lse != -torch.inf, 0)
    entropy = torch.special.entr(weights).sum(-1) + torch.special.entr(sink_weight)
    largest = scores.amax(-1) if call.keys else torch.full_like(lse, -torch.inf)
    per_row = Explanation(out.to(call.dtype), lse, entropy, largest, sink_weight)
    if not matrices:
        return per_row
    return Explanation(
        per_row.out, lse, entropy, largest, sink_weight, content=content, bias=bias, scores=scores, weights=weights
    )


def score_rows(
    call: AttentionCall, k: Float[Tensor, "batch head key dim"], rows: slice = slice(None), *, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Content, bias and scores of some rows, from keys that are finite, wide and as many as heads.

    `exact` rescores in float64 where that shows; `run` does not, since other backends are held to float32.
    """
    mask = call.visibility.mask(rows)
    q = at_least_float32(call.q[:, :, rows])
    content = call.scale * q @ k.transpose(-1, -2)
    if call.softcap is not None:
        content = call.softcap * (content / call.softcap).tanh()
    content = content.masked_fill(~mask, 0)
    if call.bias is None:
        bias = torch.zeros_like(content)
    else:
        bias = call.bias.tile(rows, slice(None)).to(content.dtype).expand_as(content).masked_fill(~mask, 0)
    if call.rescore is None:
        scores = content + bias
    else:
        rescore = call.rescore.apply if exact else call.rescore.scores
        scores = rescore(content, bias, q, k, mask, rows)
    if call.logit_scale is not None:
        scores = at_least_float32(call.logit_scale)[:, :, rows, None] * scores
    return content, bias, scores.masked_fill(~mask, -torch.inf)


def of_heads(x: Float[Tensor, "batch kv_head key dim"], group: int) -> Float[Tensor, "batch head key dim"]:
    """Keys or values for every head of the queries, in float32 or better; no copy where each has its own."""
    return at_least_float32(x) if group == 1 else at_least_float32(x).repeat_interleave(group, 1)


def sink_of(call: AttentionCall, rows: slice = slice(None)) -> Float[Tensor, "batch head row"] | None:
    """The logit of the sink for some rows."""
    if call.sink is None:
        return None
    return at_least_float32(call.sink).expand(call.batch, -1, call.queries)[:, :, rows]


def softmax(
    scores: Float[Tensor, "*rows key"], sink: Float[Tensor, "*rows"] | None = None
) -> tuple[Float[Tensor, "*rows key"], Float[Tensor, "*rows"]]:
    """Weights along the last axis and the log-sum-exp; a row of nothing but -inf has weights 0 and no gradient."""
    keys = scores.shape[-1]
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype)[..., None]], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    safe = scores.masked_fill(empty, 0)
    weights, lse = safe.softmax(-1).masked_fill(empty, 0), safe.logsumexp(-1)
    return weights[..., :keys], lse.masked_fill(empty[..., 0], -torch.inf)
