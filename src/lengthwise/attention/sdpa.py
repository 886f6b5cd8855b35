"""torch's scaled_dot_product_attention: plain without a bias, extra channels for rising levels, dense for the rest.

Under causality and rising levels -slope[i] (level[i] - level[j]) is a constant of row i, which the softmax drops, plus
slope[i] level[j]: a product of something of the query and something of the key, as q.k is. So a LevelBias can ride in a
few more channels of q and k. A half-precision number holds 8 or 11 bits, so both are split into three parts, and the
six products that matter are summed in the kernel's own float32, whose rounding is below half precision's.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention import memory
from lengthwise.attention.call import Call
from lengthwise.bias import LevelBias, wide

PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
"""Which part of the slope meets which part of the level; the other three products are below all rounding."""

MATRICES = 3
"""The bias, and scores and weights where the kernel is not fused."""

EIGHT = 8
"""Channels are added by eights, as the kernels like them."""


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    if call.rescore is not None:
        return ["rescore replaces the scores, which the fused kernel never shows"]
    return [] if fused(call) else memory.objections(call, MATRICES)


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, by the fused kernel where there is neither a bias to fill in nor a mask beyond causality."""
    clean, taint = call.contained() if call.forbids and not call.is_seen_finite else (call, None)
    if call.bias is None and fused(call):
        out = _plain(clean.q, clean.k, clean.v, call)
    else:
        out = _channels(clean) if fused(call) else _dense(clean)
    return out if taint is None else out + taint


def fused(call: Call) -> bool:
    """Whether the kernel needs no matrix of ours."""
    if call.bias is not None:
        return rides_in_channels(call)
    return not call.forbids or (call.is_plain and call.queries == call.keys)


def rides_in_channels(call: Call) -> bool:
    """Whether the bias can be extra channels and lose nothing.

    In float32 it would: scores as large as the level leave fewer bits for the rest. So would the gradient of a level
    that was rounded on its way. Whether levels rise is read from them, which a compiled graph cannot do.
    """
    bias, half = call.bias, call.dtype in (torch.bfloat16, torch.float16)
    if not isinstance(bias, LevelBias) or not half or bias.needs_grad or torch.compiler.is_compiling():
        return False
    if not (call.causal and call.is_plain and call.queries == call.keys and call.q.shape[3] == call.v.shape[3]):
        return False
    largest = bias.key_level.abs().amax()
    rising = (bias.query_level >= bias.key_level.cummax(2).values).all()
    return bool(rising & (largest < torch.finfo(torch.float16).max))


def _plain(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    causal = call.causal and call.queries > 1
    return F.scaled_dot_product_attention(q, k, v, scale=call.scale, is_causal=causal, enable_gqa=call.group > 1)


def _channels(call: Call) -> Tensor:
    """The bias as products of parts, with the values widened too: uneven heads would leave the fused kernel."""
    bias = call.bias
    assert isinstance(bias, LevelBias)
    dim = call.v.shape[3]
    width = EIGHT * (len(PAIRS) // EIGHT + 1)
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


def _dense(call: Call) -> Tensor:
    """With the bias filled in, in float32 or better throughout: a half-precision kernel would round the bias."""
    may = call.mask()
    q, k, v = (wide(x) for x in (call.q, call.k, call.v))
    if call.bias is None:
        mask = torch.zeros(may.shape, dtype=q.dtype, device=q.device).masked_fill(~may, -torch.inf)
    else:
        mask = call.bias.dense().to(q.dtype).masked_fill(~may, -torch.inf)
    alive = (mask != -torch.inf).any(-1, keepdim=True)
    mask = mask.where(alive, 0).expand(call.batch, call.heads, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=call.group > 1)
    return out.masked_fill(~alive, 0).to(call.dtype)
