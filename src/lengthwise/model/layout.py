"""Transformers' attention_mask, position_ids and cache as a layout of new and cached tokens.

- Padding takes no position. Without position_ids positions count the tokens that are not padding.
- With position_ids a position that does not rise begins a new document.
- A cached token's position is counted back from the first new token; below 0 it is an earlier document's.
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from lengthwise.bias import DenseBias, at_least_float32
from lengthwise.token_layout import Positions, Slot, TokenLayout, layout


def make_layout(
    tokens: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Int[Tensor, "#batch query"] | None,
    past: Slot = 0,
    capacity: int | None = None,
    cached: bool = False,
    causal: bool = True,
) -> TokenLayout:
    """The layout of tokens (batch, query, ...) that follow `past` cached ones.

    capacity is the length of a static cache, None for any other. In eager mode only its filled part is used.
    """
    batch, queries = tokens.shape[:2]
    eager = not torch.compiler.is_compiling()
    # What a device holds is not read back: what follows from values is left out there, as in a compiled graph.
    readable = eager and tokens.device.type == "cpu"
    if eager and (isinstance(past, int) or past.device.type == "cpu"):
        past = int(past)
    keys = cast(int, capacity if isinstance(past, Tensor) else past + queries)
    if eager and not isinstance(past, Tensor) and capacity is not None and keys > capacity:
        raise ValueError(
            f"a static cache of {capacity} tokens has {past} in it and no room for {queries} more; make a longer one"
        )
    is_open = not eager or isinstance(past, Tensor)
    mask = _key_mask(attention_mask, batch, keys, capacity, tokens.device, is_open=is_open)
    if readable and mask is not None and mask.all():
        mask = None
    if position_ids is None and mask is None and isinstance(past, int):
        return layout(queries, past=past, causal=causal, device=tokens.device)
    documents = None
    if position_ids is None:
        key = torch.arange(keys, device=tokens.device)[None] if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        query = key.index_select(1, past + torch.arange(queries, device=tokens.device))
    else:
        query = _checked_ids(position_ids, batch, queries).to(tokens.device)
        key, documents = _place(query, mask, past, keys, refuse_gaps=readable and cached)
        if readable and (documents == documents[:, :1]).all():
            documents = None
    return TokenLayout.of(query, key, key_mask=mask, documents=documents, start=past, causal=causal)


def packed_layout(mask: Bool[Tensor, "batch token"]) -> TokenLayout:
    """The tokens that are not padding, of all sequences one after the other: each sequence is a document."""
    documents = mask.nonzero()[:, 0][None]
    return layout(documents.shape[1], documents=documents, causal=False, device=mask.device)


def is_in_one_piece(mask: Bool[Tensor, "batch token"]) -> bool:
    """Whether the tokens of every sequence stand side by side: padding is at the ends, and there is a token."""
    begins = mask & ~F.pad(mask[:, :-1], (1, 0))
    return bool((begins.sum(1) == 1).all())


def with_mask(layout: TokenLayout, mask: Tensor, batch: int, heads: int, capacity: int | None) -> TokenLayout:
    """The layout with an explicit mask, True where a key is seen, in place of causality, padding and documents.

    Under a static cache the mask may cover the whole of it or what is filled.
    """
    queries, keys = layout.query_count, layout.key_count
    is_open = torch.compiler.is_compiling() or isinstance(layout.query_start, Tensor)
    fits = mask.shape[-1] <= keys if is_open else mask.shape[-1] in (keys, capacity)
    fits = fits and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == queries
    if not fits or not (mask.is_floating_point() or mask.dtype == torch.bool):
        raise ValueError(
            f"attention_mask must be boolean or floating-point, ({batch}, 1 or {heads}, {queries}, {keys}), got "
            f"{tuple(mask.shape)} of {mask.dtype}"
        )
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    visible = F.pad(visible[..., :keys], (0, max(0, keys - mask.shape[-1])))
    return replace(layout, mask=visible.to(layout.key.device), query_documents=None, key_documents=None)


def added_by(mask: Tensor, layout: TokenLayout) -> DenseBias | None:
    """What an explicit mask of numbers adds to the scores of the keys that it leaves visible."""
    if not mask.is_floating_point():
        return None
    assert layout.mask is not None
    padded = F.pad(mask[..., : layout.key_count], (0, max(0, layout.key_count - mask.shape[-1])))
    return DenseBias(at_least_float32(padded).masked_fill(~layout.mask, 0))


def _place(
    query: Int[Tensor, "#batch query"],
    mask: Bool[Tensor, "batch key"] | None,
    past: Slot,
    keys: int,
    *,
    refuse_gaps: bool,
) -> tuple[Int[Tensor, "#batch key"], Int[Tensor, "#batch key"]]:
    """Positions and documents of all keys, from the positions of the new tokens."""
    slots = _slots(query, past)
    real = torch.ones_like(query, dtype=torch.bool) if mask is None else mask.index_select(1, slots)
    query = query.expand_as(real)
    before = _last_real(query, real)
    if refuse_gaps and bool((real & (before >= 0) & (query > before + 1)).any()):
        raise ValueError(
            "position_ids must not jump where there is a cache, since cached positions are counted back, got a jump of "
            "more than 1; pass use_cache=False"
        )
    begins = real & (query <= before)

    every = torch.arange(keys, device=query.device)[None] if mask is None else F.pad(mask.cumsum(1)[:, :-1], (1, 0))
    anchor = query.gather(1, real.int().argmax(1, keepdim=True))
    counted = every.expand(query.shape[0], -1)
    key = anchor + counted - counted.index_select(1, slots[:1])
    documents = torch.where(key < 0, -1, 0).index_copy(1, slots, begins.long().cumsum(1))
    return key.index_copy(1, slots, query), documents


def _last_real(query: Positions, real: Bool[Tensor, "batch query"]) -> Positions:
    """For each token the position of the last one before it that is not padding, or -1."""
    order = torch.arange(query.shape[1], device=query.device).expand_as(query)
    last = F.pad(order.where(real, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    return query.gather(1, last.clamp(min=0)).where(last >= 0, -1)


def _slots(query: Positions, past: Slot) -> Int[Tensor, " query"]:
    return past + torch.arange(query.shape[1], device=query.device)


def _key_mask(
    mask: Tensor | None, batch: int, keys: int, capacity: int | None, device: torch.device, *, is_open: bool
) -> Bool[Tensor, "batch key"] | None:
    if mask is None:
        return None
    # Under a static cache a mask may cover the whole of it, or what is filled, which no graph and no device tells.
    fits = mask.shape[-1] <= keys if is_open else mask.shape[-1] in (keys, capacity)
    if mask.ndim != 2 or mask.shape[0] != batch or not fits:
        raise ValueError(
            f"attention_mask must be (batch, tokens) = ({batch}, {keys}), cached tokens included, 0 for padding; its "
            f"shape is {tuple(mask.shape)}. Causality and documents need no mask: give position_ids that restart."
        )
    mask = mask[:, :keys].to(device=device, dtype=torch.bool)
    return F.pad(mask, (0, keys - mask.shape[1]))


def _checked_ids(position_ids: Tensor, batch: int, queries: int) -> Positions:
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != queries:
        raise ValueError(
            f"position_ids must be (batch or 1, new tokens) = ({batch}, {queries}); their shape is "
            f"{tuple(position_ids.shape)}. Give one position per new token."
        )
    return position_ids.long()
