"""torch's scaled_dot_product_attention: plain where there is no bias, dense where there is one."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.bias import wide


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    if call.rescore is not None:
        return ["rescore replaces the scores, which the fused kernel never shows"]
    return []


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, by the fused kernel where there is neither bias nor mask beyond causality."""
    if not call.forbids:
        return _plain(call, is_causal=False) if call.bias is None else _dense(call)
    clean, taint = call.contained()
    square = call.is_plain and call.queries == call.keys
    out = _plain(clean, is_causal=call.causal) if call.bias is None and square else _dense(clean)
    return out + taint


def _plain(call: Call, *, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        call.q, call.k, call.v, scale=call.scale, is_causal=is_causal, enable_gqa=call.group > 1
    )


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
