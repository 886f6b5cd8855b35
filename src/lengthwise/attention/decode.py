"""Whole rows of attention at once, in plain torch: a few queries against many keys, as in decoding.

What a row needs is small where rows are few, so nothing is cut in tiles; keys and values are read once. Rows that are
rescored come here as well, some at a time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.backend import Output, can_be_read, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import at_least_float32

Rows = tuple[Float[Tensor, "batch head row value"], Float[Tensor, "batch head row"]]
"""Output and log-sum-exp of some rows, in float32 or better."""


def run(call: AttentionCall) -> Output:
    """The output and the log-sum-exp of all rows.

    Hidden keys show in the output only if their values are not finite, which is rare: then it is done again.
    """
    out, lse = whole_rows(call)
    good = not call.visibility.hides or (can_be_read(call) and bool(out.sum().isfinite()))
    if not good:
        clean, taint = finite_inputs(call)
        if taint is not None:
            out, lse = whole_rows(clean)
            out, lse = out + taint[..., None], lse + taint
    return out.to(call.dtype), lse if call.return_lse else None


def whole_rows(call: AttentionCall, rows: slice = slice(None)) -> Rows:
    """Some rows as attention is defined, by operations that can be differentiated; finite where keys and values are."""
    q, k, v = at_least_float32(call.q[:, :, rows]), at_least_float32(call.k), at_least_float32(call.v)
    mask = call.visibility.mask(rows)
    scores = call.scale * _by_key_head(q, k.transpose(2, 3))
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    bias = None if call.bias is None else call.bias.tile(rows, slice(None)).to(q.dtype)
    if call.rescore is not None:
        hidden = ~mask
        content = scores.masked_fill(hidden, 0)
        bias = torch.zeros_like(content) if bias is None else bias.expand_as(content).masked_fill(hidden, 0)
        own_k = k if call.group == 1 else k.repeat_interleave(call.group, 1)
        scores = call.rescore.apply(content, bias, q, own_k, mask, rows)
    elif bias is not None:
        scores = scores + bias
    if call.logit_scale is not None:
        scores = at_least_float32(call.logit_scale)[:, :, rows, None] * scores
    if call.visibility.hides:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = None
    if call.sink is not None:
        sink = at_least_float32(call.sink).expand(call.batch, -1, call.queries)[:, :, rows]
    weights, total, lse = _exponentials(scores, sink)
    return _by_key_head(weights, v) / total[..., None], lse


def _exponentials(
    scores: Float[Tensor, "*rows key"], sink: Float[Tensor, "*rows"] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights before they are divided by their sum, that sum, and its logarithm; 0, 1 and -inf for rows of nothing."""
    keys = scores.detach()
    peak = keys.amax(-1) if keys.shape[-1] else keys.new_full(keys.shape[:-1], -torch.inf)
    peak = peak if sink is None else torch.maximum(peak, sink.detach())
    empty = peak == -torch.inf
    shift = peak.masked_fill(empty, 0)
    weights = (scores - shift[..., None]).exp()
    total = weights.sum(-1)
    if sink is not None:
        total = total + (sink - shift).exp()
    total = total.masked_fill(empty, 1)
    return weights, total, (shift + total.log()).masked_fill(empty, -torch.inf)


def _by_key_head(
    x: Float[Tensor, "batch head row inner"], y: Float[Tensor, "batch kv_head inner column"]
) -> Float[Tensor, "batch head row column"]:
    """x @ y where several heads of x share one of y, which is not repeated."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    grouped = x.unflatten(1, (y.shape[1], -1))
    return (grouped.flatten(2, 3) @ y).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
