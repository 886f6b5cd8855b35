"""One attention layer with the hooks of its encoding around it: the same in our own models, fitted and stretched ones.

state of the new tokens; rotation, unless it changes as the sequence grows; the cache; rotation, if it does;
bias, rescore, logit scale and sink; attention
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from lengthwise.bias import Bias, SumBias
from lengthwise.encodings import Encoding
from lengthwise.encodings.base import Zone
from lengthwise.model.attention import Output, run_zones
from lengthwise.model.cache import remember
from lengthwise.token_layout import TokenLayout, Window, layout

Norm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys after their rotation, normed."""


def encoded_attention(
    encoding: Encoding,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    module: nn.Module,
    attention: Callable[..., Output],
    implementation: str,
    layout: TokenLayout,
    new_tokens: Callable[[], TokenLayout],
    cache: Cache | None,
    layer: int,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None = None,
    bias: Bias | None = None,
    added: Bias | None = None,
    turned: bool = False,
    norm: Norm | None = None,
    spread: int = 1,
    **kwargs: Any,
) -> Output:
    """Attention of new tokens over all keys, with heads third, and its weights if they were asked for.

    x, q, k, v   of the new tokens: what enters the module, and what it makes of it, before any rotation
    attention    the function of an implementation, see `run_zones`
    layout       of the new tokens and of all keys that the layer has once they are cached under the number `layer`
    new_tokens   the layout of the new tokens alone
    window, scale, softcap, sink    the layer's own
    bias, added  that of the encoding where it was made already; what an explicit mask adds
    turned       whether queries and keys are turned already
    spread       how many copies of a key there must be where every head of the queries turns in its own manner
    kwargs       go to the attention function
    """
    own_qk = encoding.own_qk("bias", q, k)
    state = encoding.state(x, layout.query_mask, **encoding.own_qk("state", q, k))
    # Keys are cached as they meet queries, unless that changes as the sequence grows.
    rotates, late = encoding.overrides("rotate") and not turned, encoding.rotates_late
    if rotates and not late:
        k, v = _spread(k, spread), _spread(v, spread)
        q, k = encoding.rotate(q, k, new_tokens())
        if norm is not None:
            q, k = norm(q, k)
    if cache is not None:
        k, v, state = remember(cache, layer, k, v, state)
    # Without the room that a static cache has behind; weights cover it, as everywhere in transformers.
    count = layout.key_count
    room = k.shape[2] - count
    if room:
        k, v = k[:, :, :count], v[:, :, :count]
        state = state and {name: numbers[:, :, :count] for name, numbers in state.items()}
    zones = [Zone(q, k)]
    if rotates and late:
        k, v = _spread(k, spread), _spread(v, spread)
        zones = encoding.zones(q, k, layout, state)
        if norm is not None:
            zones = [Zone(*norm(zone.q, zone.k), zone.window) for zone in zones]
    if bias is None:
        bias = encoding.bias(x, layout, state, **own_qk)
    if added is not None:
        bias = added if bias is None else SumBias((bias, added))
    out, weights = run_zones(
        attention,
        implementation,
        module,
        zones,
        v,
        layout=layout,
        bias=bias,
        rescore=encoding.rescore(x, layout, state),
        window=window,
        scale=scale,
        softcap=softcap,
        logit_scale=encoding.logit_scale(x, layout, **({} if window is None else {"window": window})),
        sink=_joined(sink, encoding.sink(x)),
        **kwargs,
    )
    return out, F.pad(weights, (0, room)) if room and weights is not None else weights


def key_copies(encoding: Encoding, *, kv_heads: int) -> int:
    """How many copies of a key there must be: one, unless every head of the queries turns in its own manner."""
    shape = encoding.shape
    if kv_heads == shape.heads or not encoding.overrides("rotate"):
        return 1
    one, x = layout(1, causal=shape.causal), torch.zeros(1, 1, shape.width)
    q, k = torch.zeros(1, shape.heads, 1, shape.head_dim), torch.zeros(1, kv_heads, 1, shape.head_dim)
    try:
        encoding.rotate(q, k, one, encoding.state(x, None, **encoding.own_qk("state", q, k)))
    except ValueError:
        return shape.heads // kv_heads
    return 1


def _spread(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, 1)


def _joined(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Sinks that take as much weight as both together."""
    if own is None or other is None:
        return other if own is None else own
    return torch.logaddexp(own.to(other.dtype) if other.ndim == 1 else own.to(other.dtype)[None, :, None], other)
