"""Attention functions as transformers knows them: ours by name, eager, and what the stock ones are given.

"lengthwise" takes the described bias. Every other implementation takes a bias filled in, as `position_bias`, and a mask
to add; both are quadratic. Stock kernels want a bias in the queries' own dtype, which in half precision would lose
positions: so they get everything in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface

from lengthwise.attention import attend, checked_call, explain, merge
from lengthwise.bias import Bias, at_least_float32
from lengthwise.encodings.base import Zone
from lengthwise.token_layout import TokenLayout, Window

# Attention functions are known to all of transformers by name, so a copy in an exported model has its own.
NAME = "lengthwise" if __name__.startswith("lengthwise.") else __name__

Output = tuple[Float[Tensor, "batch query head dim"], Tensor | None]
"""The output with heads third, and the weights or None."""

CAPTURE = f"{NAME}_capture"
"""The function that `model/families/lengthwise.py` registers: it calls another one and reports its arguments."""

OPTIONS = ("bias", "rescore", "window", "scale", "softcap", "logit_scale", "sink")
"""What `attend` takes beside the layout."""

DESCRIBED = (NAME, "eager", CAPTURE)
"""Implementations that take the bias as it is described."""


def lengthwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: TokenLayout | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Output:
    """`lw.attend` under transformers' signature; the weights only if asked for, by the reference."""
    if layout is None:
        raise NotImplementedError(
            f"attention 'lengthwise' needs a layout of the tokens, which only Lengthwise models give, got none from "
            f"{type(module).__name__}; use 'sdpa' there"
        )
    options = attend_options(kwargs)
    if output_attentions:
        explanation = explain(query, key, value, layout=layout, **options)
        assert explanation.weights is not None
        return explanation.out.transpose(1, 2), explanation.weights.to(query.dtype)
    return attend(query, key, value, layout=layout, **options).transpose(1, 2), None


def attend_options(kwargs: dict[str, Any]) -> Any:
    """What `attend` takes beside the layout, of the arguments of an attention function."""
    return {name: kwargs[name] for name in OPTIONS if name in kwargs}


def lengthwise_mask(*, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The padding alone, (batch, key): our attention knows causality and documents by itself."""
    return attention_mask if attention_mask is None else attention_mask[:, :kv_length]


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Output:
    """Attention in plain matrices, for those who want the weights."""
    return lengthwise_attention(module, query, key, value, None, **(kwargs | {"output_attentions": True}))


def run_attention(
    attention: Callable[..., Output],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: TokenLayout,
    **options: Any,
) -> Output:
    """Attention by the function of an implementation, with its inputs as it takes them."""
    if implementation in DESCRIBED:
        return attention(module, query, key, value, None, layout=layout, **options)
    own = {name: options.pop(name, None) for name in ("bias", "window", "logit_scale", "sink")}
    qkv, mask, dense = stock_inputs(query, key, value, layout, implementation=implementation, **own)
    scale = options.pop("scale")
    out, weights = attention(module, *qkv, mask, scaling=scale, dropout=0.0, position_bias=dense, **options)
    return out, None if weights is None else weights.to(query.dtype)


def run_zones(
    attention: Callable[..., Output],
    implementation: str,
    module: nn.Module,
    zones: Sequence[Zone],
    value: Tensor,
    *,
    layout: TokenLayout,
    window: Window | None,
    **options: Any,
) -> Output:
    """Attention over all zones: one by the function of an implementation, several by ours alone."""
    if len(zones) == 1:
        q, k, own = zones[0]
        options["window"] = window if own is None else own
        return run_attention(attention, implementation, module, q, k, value, layout=layout, **options)
    if implementation not in (NAME, "eager"):
        raise NotImplementedError(
            f"several bands are merged under attention {NAME!r} or 'eager', got {implementation!r}; a stretched model "
            "can be captured after lw.unstretch(model)"
        )
    weights = implementation == "eager" or options.get("output_attentions", False)
    return attend_zones(zones, value, layout=layout, weights=weights, **attend_options(options))


def attend_zones(
    zones: Sequence[Zone],
    value: Tensor,
    *,
    layout: TokenLayout,
    weights: bool = False,
    sink: Tensor | None = None,
    **options: Any,
) -> Output:
    """What attention gives for each zone, merged; a sink belongs to the first. The weights by the reference."""
    calls = [
        (zone.q, zone.k, value, options | {"window": zone.window, "sink": None if number else sink})
        for number, zone in enumerate(zones)
    ]
    if not weights:
        parts = [attend(q, k, v, layout=layout, return_lse=True, **own) for q, k, v, own in calls]
        return merge(*parts)[0].transpose(1, 2), None
    explained = [explain(q, k, v, layout=layout, **own) for q, k, v, own in calls]
    out, lse = merge(*((part.out, part.lse) for part in explained))
    every = torch.zeros((), device=value.device)
    for part in explained:
        assert part.weights is not None
        share = (part.lse - lse).exp().masked_fill(part.lse == -torch.inf, 0)
        every = every + share[..., None] * part.weights
    return out.transpose(1, 2), every.to(value.dtype)


def stock_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TokenLayout,
    *,
    implementation: str,
    bias: Bias | None = None,
    window: Window | None = None,
    logit_scale: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | BlockMask | None, Tensor | None]:
    """Queries, keys and values, the mask and the position bias of one call, as the stock functions take them.

    Masks are added: the smallest number where a key must not be seen, so that rows which see nothing stay finite. Flex
    wants its own kind of mask; with a tensor torch 2.13's kernel for CPUs writes out of bounds. A logit scale is on the
    queries and the bias; a sink is one more key, of which every channel and value is 0 and whose bias is the logit.
    """
    options: Any = {"bias": bias, "window": window, "logit_scale": logit_scale, "sink": sink}
    call = checked_call(query, key, value, layout=layout, **options)
    plain = call.is_bare and call.visibility.is_plain
    if implementation == "sdpa" and plain and call.queries in (1, call.keys):
        return (query, key, value), None, None
    query, key, value = (at_least_float32(x).contiguous() for x in (query, key, value))
    shape = (call.batch, call.heads, call.queries, call.keys)
    dense = None if bias is None else bias.dense().to(query.dtype).expand(shape).contiguous()
    visible = call.visibility.mask().expand(call.batch, -1, -1, -1)
    if call.logit_scale is not None:
        factor = call.logit_scale.to(query.dtype)[..., None]
        query, dense = query * factor, None if dense is None else dense * factor
    if call.sink is not None:
        key, value, visible = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), F.pad(visible, (0, 1), value=True)
        own = call.sink.to(query.dtype).expand(*shape[:3])[..., None]
        dense = torch.cat([query.new_zeros(shape) if dense is None else dense, own], -1)
    if implementation != "flex_attention":
        mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)
        return (query, key, value), mask.contiguous(), dense
    every = visible.expand(-1, call.heads, -1, -1).contiguous()
    block = create_block_mask(
        lambda b, h, q, k: every[b, h, q, k],
        call.batch,
        call.heads,
        call.queries,
        key.shape[2],
        device=query.device.type,
    )
    return (query, key, value), block, dense


AttentionInterface.register(NAME, lengthwise_attention)
AttentionMaskInterface.register(NAME, lengthwise_mask)
