"""Attention functions as transformers knows them: ours by name, eager, and what the stock ones are given.

"lengthwise" takes the described bias. Every other implementation takes a bias filled in, as `position_bias`, and a mask
to add; both are quadratic. Stock kernels want a bias in the queries' own dtype, which in half precision would lose
positions: so they get everything in float32.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface

from lengthwise.attention import attend, checked_call, explain
from lengthwise.attention.call import Rescore
from lengthwise.attention.reference import softmax
from lengthwise.bias import Bias, wide
from lengthwise.model.frame import Frame

NAME = "lengthwise"

Output = tuple[Float[Tensor, "batch query head dim"], Tensor | None]
"""The output with heads third, and the weights or None."""


def lengthwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bias: Bias | None = None,
    rescore: Rescore | None = None,
    frame: Frame | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Output:
    """`lw.attend` under transformers' signature; the weights only if asked for, by the reference."""
    if frame is None:
        raise NotImplementedError(
            "attention 'lengthwise' needs to know where tokens stand, which only Lengthwise models tell; "
            f"{type(module).__name__} called it. Use 'sdpa' there."
        )
    masks: dict[str, Any] = {"key_mask": frame.key_mask, "documents": frame.documents, "start": frame.start}
    if output_attentions:
        found = explain(checked_call(query, key, value, bias=bias, rescore=rescore, **masks))
        return found.out.transpose(1, 2), found.weights.to(query.dtype)
    return attend(query, key, value, bias=bias, rescore=rescore, **masks).transpose(1, 2), None


def lengthwise_mask(*, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The padding alone, (batch, key): our attention knows causality and documents by itself."""
    return attention_mask if attention_mask is None else attention_mask[:, :kv_length]


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    position_bias: Tensor | None = None,
    rescore: Rescore | None = None,
    **kwargs: Any,
) -> Output:
    """Attention in plain matrices, for those who want the weights."""
    mask = attention_mask > torch.finfo(attention_mask.dtype).min
    scores = scaling * query @ key.transpose(-1, -2)
    bias = torch.zeros_like(scores) if position_bias is None else position_bias
    if rescore is None:
        scores = scores + bias
    else:
        # A rescore sees all heads of a pair at once: it knows the pairs that some head may see.
        pairs = mask.any(1, keepdim=True)
        scores = rescore(scores.masked_fill(~mask, 0), bias.masked_fill(~mask, 0), query, pairs)
    weights = softmax((scores + attention_mask).masked_fill(~mask, -torch.inf))
    return (weights @ value).transpose(1, 2), weights


def stock_inputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, frame: Frame, *, implementation: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | BlockMask | None, Tensor | None]:
    """Queries, keys and values, the mask and the position bias of one call, as the stock functions take them.

    Masks are added: the smallest number where a key must not be seen, so that rows which see nothing stay finite. Flex
    wants its own kind of mask; with a tensor torch 2.13's kernel for CPUs writes out of bounds.
    """
    call = checked_call(
        query, key, value, key_mask=frame.key_mask, documents=frame.documents, start=frame.start, bias=bias
    )
    plain = bias is None and frame.mask is None and call.is_plain and call.queries in (1, call.keys)
    if plain and implementation == "sdpa":
        return (query, key, value), None, None
    query, key, value = (wide(x).contiguous() for x in (query, key, value))
    shape = (call.batch, call.heads, call.queries, call.keys)
    dense = None if bias is None else bias.dense().to(query.dtype).expand(shape).contiguous()
    mask = _added(call.mask() if frame.mask is None else frame.mask, query.dtype).expand(call.batch, -1, -1, -1)
    if implementation != "flex_attention":
        return (query, key, value), mask.contiguous(), dense
    seen = (mask > torch.finfo(mask.dtype).min).expand(-1, call.heads, -1, -1).contiguous()
    block = create_block_mask(
        lambda b, h, q, k: seen[b, h, q, k], call.batch, call.heads, call.queries, call.keys, device=query.device.type
    )
    if frame.mask is not None and frame.mask.is_floating_point():
        dense = (mask.where(seen, 0) if dense is None else dense + mask.where(seen, 0)).contiguous()
    return (query, key, value), block, dense


def _added(mask: Tensor, dtype: torch.dtype) -> Float[Tensor, "#batch #head query key"]:
    """A mask as numbers to add: the smallest one of the dtype where a key must not be seen."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min, lowest)


AttentionInterface.register(NAME, lengthwise_attention)
AttentionMaskInterface.register(NAME, lengthwise_mask)
