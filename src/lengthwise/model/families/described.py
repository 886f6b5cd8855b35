"""What the classes share by which we get into families that have attention code of their own.

A class of a family is swapped for a subclass with the same weights, whose forward pass calls `Described.attend`. Under
`lw.accelerate` that adds the family's own bias, described; under `lw.fit` it runs whatever is in the place of the
layer's attention. The layout of a pass rides in the place of the mask, which the registered mask function makes once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from lengthwise.bias import Bias, DistanceBias, LevelBias
from lengthwise.model.attention import Output, lengthwise_attention
from lengthwise.model.cache import remember
from lengthwise.model.families.base import ACCELERATED
from lengthwise.model.families.layer_call import PLAIN, LayerCall, Placed, Run, check_no_dropout
from lengthwise.model.families.swap import swapped_attention
from lengthwise.token_layout import Slot, TokenLayout, layout

BY_LAYER = object()
"""Stands where T5 and its relatives would fill in a bias."""


class Described:
    """The base of all swapped classes."""

    leaves_out_dropout = False
    takes_runs: ClassVar[bool] = False
    """Whether something else can be put in the place of its attention, as `lw.fit` does."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        placed: Any,
        *,
        bias: Callable[[Placed], Bias | None],
        scale: float,
        dropout: float = 0.0,
        weights: bool = False,
        cache: Any = None,
        lengthwise: tuple[Run, dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Output:
        """Attention of a layer, heads third; `dropout` is what the layer would apply to its weights.

        `lengthwise` is what a swap puts in the place of it.
        """
        module: Any = self
        if cache is not None:
            k, v, _ = remember(cache, module.layer_idx, k, v, None)
        if lengthwise is not None:
            dropout = dropout if module.training else 0.0
            return swapped_attention(module, q, k, v, None, lengthwise=lengthwise, scaling=scale, dropout=dropout)
        if not isinstance(placed, Placed):
            raise NotImplementedError(f"{type(self).__name__} must be given the mask that its model makes")
        if module.training and not self.leaves_out_dropout:
            check_no_dropout(module, dropout, "pass attention_dropout='leave out'")
        places, weights = placed.layout, weights or placed.weights
        if placed.observer is None and not weights and k.shape[2] == places.key_count:
            # What the general road comes to without hooks, weights and room behind the keys: decoding feels it.
            return lengthwise_attention(module, q, k, v, None, layout=places, bias=bias(placed), scale=scale)
        own = replace(placed, weights=True) if weights else placed
        number = getattr(module, "layer_idx", None) or 0
        call = LayerCall(module, number, q, places, own, cache=None, q=q, k=k, v=v, scale=scale)
        return call.run(PLAIN, bias=bias(placed))


def shared(placed: Placed, owner: object, make: Callable[[], Bias]) -> Bias:
    """A bias of positions alone: where no gradient is wanted it is made once, for all layers with the same owner."""
    bias: Bias = make() if torch.is_grad_enabled() else placed.once(id(owner), make)
    return bias


def placed_by(
    mask: Tensor | None,
    queries: int,
    keys: int,
    *,
    past: Slot = 0,
    causal: bool = True,
    across: bool = False,
    device: torch.device | str | None = None,
) -> Placed:
    """The tokens of a pass from transformers' padding mask, (batch, key), and the sizes. Positions are slots."""
    eager = not torch.compiler.is_compiling()
    if eager:
        past = int(past)
    if not across and isinstance(past, int):
        keys = past + queries
    key_mask = _key_mask(mask, keys, eager=eager)
    if key_mask is None and not across and isinstance(past, int):
        return Placed(layout(queries, past=past, causal=causal, device=device))
    query, key = (torch.arange(count, device=device)[None] for count in (queries, keys))
    start: Slot = keys if across else past
    query = query if across else query + past
    return Placed(TokenLayout.of(query, key, key_mask=key_mask, start=start, causal=causal))


def _key_mask(mask: Tensor | None, keys: int, *, eager: bool) -> Bool[Tensor, "batch key"] | None:
    if mask is None:
        return None
    if mask.ndim != 2:
        raise NotImplementedError(f"attention_mask must be (batch, key), 0 for padding, got {mask.ndim} axes")
    mask = mask[:, :keys].bool()
    return None if eager and bool(mask.all()) else mask


def accelerated_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Slot = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Placed | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Placed:
    """The tokens of a pass, in the place of a mask; `generate` may have had it made already, for a static cache."""
    if isinstance(attention_mask, Placed):
        attention_mask = attention_mask.padding
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise NotImplementedError(
            "an accelerated model knows padding and order alone, got a mask of another kind over them"
        )
    two_sided = mask_function is bidirectional_mask_function
    across = two_sided and q_length != kv_length
    placed = placed_by(
        attention_mask, q_length, kv_length, past=q_offset, causal=not two_sided, across=across, device=device
    )
    return placed if attention_mask is None else replace(placed, padding=attention_mask)


def accelerated_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Placed | None,
    *,
    scaling: float = 1.0,
    dropout: float = 0.0,
    position_bias: object = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> Output:
    """The attention function that transformers knows, for families that call one: the layer describes its own bias."""
    own: Output = module.attend(
        *(query, key, value, attention_mask),
        bias=module.described_bias,
        scale=scaling,
        dropout=dropout,
        weights=module.config.output_attentions if output_attentions is None else output_attentions,
    )
    return own


def by_distance(
    bucket: Callable[[Tensor], Tensor], weight: Float[Tensor, "bucket head"], reach: int, placed: Placed
) -> DistanceBias:
    """T5's bias: a row of the table for every distance, the same beyond `reach`. `bucket` takes key minus query."""
    places = placed.layout
    first = 0 if places.causal else -reach
    distance = torch.arange(first, reach + 1, device=weight.device)
    return DistanceBias(weight[bucket(-distance)].T.contiguous(), places.query, places.key, first)


def by_level(levels: Float[Tensor, "#batch head key"], placed: Placed) -> LevelBias:
    """What families with ALiBi add, a number for every key, less that of the query: the same to a softmax.

    The numbers are taken as the model has them, rounded as it rounds them.
    """
    key = levels.double()
    one = torch.ones(1, 1, 1, device=levels.device)
    return LevelBias(key.index_select(2, placed.layout.query_slots()), key[..., : placed.layout.key_count], one)


AttentionInterface.register(ACCELERATED, accelerated_attention)
AttentionMaskInterface.register(ACCELERATED, accelerated_mask)
