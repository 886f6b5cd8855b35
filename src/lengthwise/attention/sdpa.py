"""torch's scaled_dot_product_attention: plain without a bias, extra channels for rising levels, dense for the rest.

Under causality and rising levels -slope[i] (level[i] - level[j]) is a constant of row i, which the softmax drops, plus
slope[i] level[j]: a product of something of the query and something of the key, as q.k is. So a LevelBias can ride in a
few more channels of q and k. A half-precision number holds 8 or 11 bits, so both are split into three parts, and the
six products that matter are summed in the kernel's own float32, whose rounding must stay below half precision's: levels
whose products are too large for that are filled in.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs, memory_refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import LevelBias, at_least_float32

PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
"""Which part of the slope meets which part of the level; the other three products are below all rounding."""

MATRICES = 3
"""The bias, and scores and weights where the kernel is not fused."""

CHANNELS = 8
"""Channels are added by so many, as the kernels like them."""


def plan(call: AttentionCall) -> Plan | Refusal:
    """The fused kernel where it needs no matrix of ours, else one that is filled in."""
    reasons = []
    if call.rescore is not None:
        reasons.append("rescore replaces the scores, which the fused kernel never shows")
    if call.softcap is not None:
        reasons.append("a softcap changes the scores inside the fused kernel")
    if call.sink is not None or call.return_lse:
        reasons.append("torch's function does not give the log-sum-exp, which a sink needs too")
    if reasons:
        return Refusal(tuple(reasons))
    return Plan() if is_fused(call) else memory_refusal(call, MATRICES) or Plan()


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output, by the fused kernel where there is neither a bias to fill in nor a mask beyond causality."""
    clean, taint = finite_inputs(call)
    if not is_fused(call):
        out = _dense(clean)
    else:
        out = _plain(clean) if call.bias is None else _channels(clean)
    return (out if taint is None else out + taint[..., None].to(out.dtype)), None


def is_fused(call: AttentionCall) -> bool:
    """Whether the kernel needs no matrix of ours."""
    if call.bias is not None:
        return rides_in_channels(call)
    if call.logit_scale is not None:
        return False
    visibility = call.visibility
    return not visibility.hides or (visibility.is_plain and call.queries == call.keys)


def rides_in_channels(call: AttentionCall) -> bool:
    """Whether the bias can be extra channels and lose nothing.

    In float32 it would: scores as large as the level leave fewer bits for the rest. In half precision a score must have
    no rounding in float32 beyond that of a weight, so that 32,768 tokens of FoX are too many for float16. The gradient
    of a level would be rounded on its way. Whether levels rise is read from them, which a compiled graph cannot do.
    """
    bias, half = call.bias, call.dtype in (torch.bfloat16, torch.float16)
    if not isinstance(bias, LevelBias) or not half or bias.needs_grad or torch.compiler.is_compiling():
        return False
    if bias.curve != "linear" or bias.query_rest is not None or call.logit_scale is not None:
        return False
    visibility = call.visibility
    square = visibility.is_plain and call.queries == call.keys and call.q.shape[3] == call.v.shape[3]
    if not (visibility.is_causal and square):
        return False
    levels = bias.summed()
    assert levels.query_level is not None
    assert levels.key_level is not None
    largest = levels.key_level.abs().amax()
    steepest = largest * levels.slope.abs().amax()
    room = torch.finfo(call.dtype).eps / torch.finfo(torch.float32).eps
    rising = (levels.query_level >= levels.key_level.cummax(2).values).all()
    return bool(rising & (largest < torch.finfo(torch.float16).max) & (steepest <= room))


def _plain(call: AttentionCall) -> Tensor:
    # By a branch: in a graph with open lengths a comparison is no plain bool, which torch's function wants.
    order: dict[str, Any] = {"is_causal": True} if call.visibility.is_causal and call.queries > 1 else {}
    return F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale, enable_gqa=call.group > 1, **order)


def _channels(call: AttentionCall) -> Tensor:
    """The bias as products of parts, with the values widened too: uneven heads would leave the fused kernel."""
    assert isinstance(call.bias, LevelBias)
    bias = call.bias.summed()
    assert bias.key_level is not None
    dim = call.v.shape[3]
    width = CHANNELS * (len(PAIRS) // CHANNELS + 1)
    slope = bias.slope.double().expand(-1, -1, call.queries) / call.scale
    of_query, of_key = _parts(slope, call.dtype), _parts(bias.key_level, call.dtype)
    shape = (call.batch, call.heads)
    q, k = call.q.new_zeros(*shape, call.queries, dim + width), call.k.new_zeros(*shape, call.keys, dim + width)
    q[..., :dim], k[..., :dim] = call.q, call.k.repeat_interleave(call.group, 1)
    for channel, (a, b) in enumerate(PAIRS, start=dim):
        q[..., channel], k[..., channel] = of_query[a], of_key[b]
    v = F.pad(call.v.repeat_interleave(call.group, 1), (0, width))
    return F.scaled_dot_product_attention(q, k, v, scale=call.scale, is_causal=True)[..., :dim]


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Three numbers of low precision whose sum is x."""
    parts: list[Tensor] = []
    for _ in range(3):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    return parts


def _dense(call: AttentionCall) -> Tensor:
    """With the bias filled in, in float32 or better throughout: a half-precision kernel would round the bias."""
    visible = call.visibility.mask()
    q, k, v = (at_least_float32(x) for x in (call.q, call.k, call.v))
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    if call.bias is not None:
        bias = call.bias.dense().to(q.dtype)
    if call.logit_scale is not None:
        factor = at_least_float32(call.logit_scale)[..., None].to(q.dtype)
        q, bias = q * factor, bias * factor
    bias = bias.masked_fill(~visible, -torch.inf)
    empty = (bias == -torch.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(empty, 0).expand(call.batch, call.heads, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=call.scale, enable_gqa=call.group > 1)
    return out.masked_fill(empty, 0).to(call.dtype)
