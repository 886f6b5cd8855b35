"""What the classes share by which `lw.accelerate` describes the bias of families that fill it in.

A class of a family is swapped for a subclass with the same weights, whose forward pass calls `Rows.attend`. The rows of
a pass ride in the place of the mask, which the registered mask function makes once.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function

from lengthwise.bias import Bias, DistanceBias, LevelBias
from lengthwise.model.attention import Output, lengthwise_attention
from lengthwise.token_layout import Slot, TokenLayout, layout

ACCELERATED = "lengthwise_accelerated"
"""The name under which transformers knows our attention and mask functions."""

BY_LAYER = object()
"""Stands where T5 and its relatives would fill in a bias."""


class Rows:
    """The tokens of one pass, in the place of a mask: where they stand, and what layers have described already."""

    ndim = 0
    """Families look at a mask's axes before they add to it."""

    def __init__(self, places: TokenLayout) -> None:
        self.layout = places
        self.biases: dict[int, Bias] = {}

    def to(self, *args: Any, **kwargs: Any) -> "Rows":
        """MPT makes its mask one of booleans."""
        return self

    def bias(self, owner: object, make: Callable[[], Bias]) -> Bias:
        """A bias of positions alone: where no gradient is wanted it is made once, for all layers that share it."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        if id(owner) not in self.biases:
            self.biases[id(owner)] = make()
        return self.biases[id(owner)]

    def attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Bias | None,
        scale: float,
        dropout: float = 0.0,
        weights: bool = False,
    ) -> Output:
        """Attention of a layer, heads third; `dropout` is what the layer would apply to its weights."""
        if dropout and module.training and not module.leaves_out_dropout:
            raise NotImplementedError(
                f"{type(module).__bases__[-1].__name__} trains with attention dropout {dropout}, which there is not "
                "here; set it to 0 in the config, or pass attention_dropout='leave out'"
            )
        count = self.layout.key_count
        if k.shape[2] > count:
            # Without the room that a static cache has behind.
            k, v = k[:, :, :count], v[:, :, :count]
        return lengthwise_attention(
            module, q, k, v, None, layout=self.layout, bias=bias, scale=scale, output_attentions=weights
        )


class Described:
    """The base of all swapped classes."""

    leaves_out_dropout = False


def rows_of(
    mask: Tensor | None,
    queries: int,
    keys: int,
    *,
    past: Slot = 0,
    causal: bool = True,
    across: bool = False,
    device: torch.device | str | None = None,
) -> Rows:
    """The rows of a pass from transformers' padding mask, (batch, key), and the sizes. Positions are slots."""
    eager = not torch.compiler.is_compiling()
    if eager:
        past = int(past)
    if not across and isinstance(past, int):
        keys = past + queries
    key_mask = _key_mask(mask, keys, eager=eager)
    if key_mask is None and not across and isinstance(past, int):
        return Rows(layout(queries, past=past, causal=causal, device=device))
    query, key = (torch.arange(count, device=device)[None] for count in (queries, keys))
    start: Slot = keys if across else past
    query = query if across else query + past
    return Rows(TokenLayout.of(query, key, key_mask=key_mask, start=start, causal=causal))


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
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Rows:
    """The rows of a pass, in the place of a mask."""
    two_sided = mask_function is bidirectional_mask_function
    across = two_sided and q_length != kv_length
    return rows_of(
        attention_mask, q_length, kv_length, past=q_offset, causal=not two_sided, across=across, device=device
    )


def accelerated_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rows | None,
    *,
    scaling: float = 1.0,
    dropout: float = 0.0,
    position_bias: object = None,
    **kwargs: Any,
) -> Output:
    """The attention function that transformers knows, for families that call one: the layer describes its own bias."""
    rows = attention_mask
    if not isinstance(rows, Rows):
        raise NotImplementedError(f"{type(module).__name__} must be given the mask that its model makes")
    return rows.attend(module, query, key, value, bias=module.described_bias(rows), scale=scaling, dropout=dropout)


def by_distance(
    bucket: Callable[[Tensor], Tensor], weight: Float[Tensor, "bucket head"], reach: int, rows: Rows
) -> DistanceBias:
    """T5's bias: a row of the table for every distance, the same beyond `reach`. `bucket` takes key minus query."""
    first = 0 if rows.layout.causal else -reach
    distance = torch.arange(first, reach + 1, device=weight.device)
    return DistanceBias(weight[bucket(-distance)].T.contiguous(), rows.layout.query, rows.layout.key, first)


def by_level(levels: Float[Tensor, "#batch head key"], rows: Rows) -> LevelBias:
    """What families with ALiBi add, a number for every key, less that of the query: the same to a softmax.

    The numbers are taken as the model has them, rounded as it rounds them.
    """
    key = levels.double()
    one = torch.ones(1, 1, 1, device=levels.device)
    return LevelBias(key.index_select(2, rows.layout.query_slots()), key[..., : rows.layout.key_count], one)


AttentionInterface.register(ACCELERATED, accelerated_attention)
AttentionMaskInterface.register(ACCELERATED, accelerated_mask)
