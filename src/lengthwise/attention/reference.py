"""Attention as it is defined, written to be read: every other backend must agree with this one.

content = scale q k^T                           0 where the mask forbids
scores  = content + bias, or rescore(content, bias, q, mask)
out     = softmax(scores) v                     over the keys that the mask allows; 0 where there are none
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention import memory
from lengthwise.attention.call import Call
from lengthwise.bias import wide


@dataclass(frozen=True, eq=False)
class Explanation:
    """Everything attention computes on the way to its output. Forbidden places: 0, in `scores` -inf."""

    out: Float[Tensor, "batch head query value"]
    content: Float[Tensor, "batch head query key"]
    bias: Float[Tensor, "batch head query key"]
    scores: Float[Tensor, "batch head query key"]
    weights: Float[Tensor, "batch head query key"]


MATRICES = 4
"""Content, bias, scores and weights are filled in."""


def objections(call: Call) -> list[str]:
    """The reference takes every call that fits into memory."""
    return memory.objections(call, MATRICES)


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output alone."""
    return explain(call).out


def explain(call: Call) -> Explanation:
    """The output and what led to it, in float32 or better; only the output returns to the call's dtype."""
    clean, taint = call.contained()
    k, v = (of_heads(x, call.group) for x in (clean.k, clean.v))
    content, bias, scores = scored(call, k, None if call.bias is None else call.bias.dense())
    weights = softmax(scores)
    out = (weights @ v).to(call.dtype) + taint
    return Explanation(out=out, content=content, bias=bias, scores=scores, weights=weights)


def scored(
    call: Call,
    k: Float[Tensor, "batch head key dim"],
    bias: Float[Tensor, "#batch #head row key"] | None,
    rows: slice = slice(None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Content, bias and scores of some rows, from keys that are finite, wide and as many as heads, and their bias."""
    mask = call.mask(rows)
    q = wide(call.q[:, :, rows])
    content = (call.scale * q @ k.transpose(-1, -2)).masked_fill(~mask, 0)
    bias = torch.zeros_like(content) if bias is None else bias.expand_as(content).masked_fill(~mask, 0)
    scores = content + bias if call.rescore is None else call.rescore(content, bias, q, mask)
    return content, bias, scores.masked_fill(~mask, -torch.inf)


def of_heads(x: Float[Tensor, "batch kv_head key dim"], group: int) -> Float[Tensor, "batch head key dim"]:
    """Keys or values for every head of the queries, in float32 or better; no copy where each has its own."""
    return wide(x) if group == 1 else wide(x).repeat_interleave(group, 1)


def softmax(scores: Float[Tensor, "*rows key"]) -> Float[Tensor, "*rows key"]:
    """Weights along the last axis; a row of nothing but -inf has weights 0 and gradient 0, not NaN."""
    alive = (scores != -torch.inf).any(-1, keepdim=True)
    return scores.where(alive, 0).softmax(-1).masked_fill(~alive, 0)
