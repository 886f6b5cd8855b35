"""What each query sees as tiles.cpp reads it: a few intervals of keys, and which keys are padding."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.token_layout import TokenLayout, row_of


def visible_intervals(call: AttentionCall) -> dict[str, Tensor] | Refusal:
    """The intervals of keys that each query sees, and which keys are padding, if there is some between others."""
    visibility, mask = call.visibility, call.layout.key_mask
    order, (low, high) = visibility.intervals()
    if order is not None and not _is_identity(order):
        visibility = replace(visibility, layout=_in_order_of_appearance(call.layout))
        order, (low, high) = visibility.intervals()
        assert order is not None
        if not _is_identity(order):
            return Refusal.because("a document is in more than one piece, so that its keys are no interval")
    tensors = {}
    if mask is not None and mask.numel():
        first, last = _ends(mask)
        low, high = torch.maximum(low, first[:, None]), torch.minimum(high, last[:, None])
        if bool((mask.sum(1) != last - first).any()):
            tensors["key_mask"] = mask.to(torch.uint8).contiguous()
    for name, ends in (("low", low), ("high", high)):
        tensors[name] = ends.expand(-1, call.batch, -1).int().contiguous()
    return tensors


def _is_identity(order: Int[Tensor, "#batch key"]) -> bool:
    return bool((order == torch.arange(order.shape[1])).all())


def _in_order_of_appearance(layout: TokenLayout) -> TokenLayout:
    """The same layout with documents numbered by which of them comes first among the keys."""
    assert layout.key_documents is not None
    assert layout.query_documents is not None
    keys, queries = [], []
    for row in range(layout.batch):
        own = row_of(layout.key_documents, row)
        numbers, place = torch.cat([own, row_of(layout.query_documents, row)]).unique(return_inverse=True)
        first = torch.full_like(numbers, len(place)).scatter_reduce(0, place, torch.arange(len(place)), "amin")
        renumbered = first[place]
        keys.append(renumbered[: len(own)])
        queries.append(renumbered[len(own) :])
    return replace(layout, key_documents=torch.stack(keys), query_documents=torch.stack(queries))


def _ends(mask: Bool[Tensor, "#batch key"]) -> tuple[Int[Tensor, " #batch"], Int[Tensor, " #batch"]]:
    """The first True and one past the last; both 0 where there is none."""
    keys, some = mask.shape[1], mask.any(1)
    first = mask.int().argmax(1)
    last = keys - mask.flip(1).int().argmax(1)
    return first.where(some, 0), last.where(some, 0)
