"""A layout of this process's tokens of a sequence, and tensors that are cut and put together by it."""

from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lengthwise.distributed.collectives import check_alike, gathered
from lengthwise.distributed.ring import ring_attend, shared_sequence
from lengthwise.distributed.sequence import SharedSequence
from lengthwise.distributed.sharding import SEGMENT_TOKENS, cut, owned, zigzag
from lengthwise.errors import describe
from lengthwise.token_layout import TokenLayout


@final
class ProcessRing(SharedSequence):
    """What a spread layout gives to hooks and to `lw.attend`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, key_mask: Tensor | None = None, **options: Any
    ) -> Any:
        """`ring_attend`, for `lw.attend`."""
        if key_mask is not None or not causal:
            raise ValueError("a layout has its own key_mask and causal, got them beside it; give them to lw.layout")
        return ring_attend(q, k, v, **options)


def spread(layout: TokenLayout, group: ProcessGroup | None = None) -> TokenLayout:
    """The layout of the tokens that this process has of a sequence, for all hooks and for `lw.attend`.

    `layout` is that of all tokens, the same in all processes of the group. A length need not be a multiple of anything:
    chunks differ by one token at most.
    """
    if not dist.is_initialized():
        raise RuntimeError("a process group must be there to spread a sequence over, got none; start with torchrun")
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {describe(layout)}; make one with lw.layout")
    if layout.ring is not None:
        raise ValueError("the layout must be that of all tokens, got a part that is spread already")
    if layout.mask is not None:
        raise NotImplementedError(
            "an explicit mask cannot be spread over processes, got one; use documents or a window"
        )
    length = layout.key_count
    if layout.query_count != length or layout.start != 0:
        raise ValueError(
            f"the layout must be one pass over all tokens, got {layout.query_count} queries and {length} keys; a cache "
            "cannot be spread"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process must be one of the group's, got a group without it; give each its own group")
    if length < 2 * size:
        raise ValueError(
            f"{size} processes can share a sequence of {2 * size} tokens or more, two chunks each, got {length}; pad "
            "it, or use fewer processes"
        )
    query, key = layout.query, layout.key
    if query is not key and (query.shape[1:] != key.shape[1:] or not (query == key).all()):
        raise ValueError("the tokens must have the same positions as queries and as keys, got others")
    # Also the group's first exchange, in which NCCL wants all processes to take part.
    check_alike(
        "spread the same layout",
        {"length": length, "batch": layout.batch, "causal": int(layout.causal)},
        {"positions": layout.key, "padding": layout.key_mask, "documents": layout.key_documents},
        group,
    )
    query_index, key_index = layout.indices()
    # Counted once, over all tokens, where a token's number is not its slot.
    is_counted = layout.key_mask is not None or layout.key_documents is not None
    whole = replace(layout, query_index=query_index, key_index=key_index) if is_counted else layout
    chunks = zigzag(length, size)
    own = [chunks[i] for i in owned(rank, size)]
    slots = torch.cat([torch.arange(chunk.first, chunk.stop, device=layout.key.device) for chunk in own])

    def of_own(x: Tensor) -> Tensor:
        return x.index_select(1, slots)

    positions, index = of_own(layout.key), of_own(key_index)
    mask = None if layout.key_mask is None else of_own(layout.key_mask)
    documents = None if layout.key_documents is None else of_own(layout.key_documents)
    ring = ProcessRing(
        whole=whole,
        slots=slots,
        pieces=tuple((chunk.own, chunk.first) for chunk in own),
        chunks=chunks,
        segments=cut(chunks, SEGMENT_TOKENS.get(layout.key.device.type, max(SEGMENT_TOKENS.values()))),
        group=group,
        rank=rank,
        size=size,
    )
    return TokenLayout(
        query=positions,
        key=positions,
        query_mask=mask,
        key_mask=mask,
        query_documents=documents,
        key_documents=documents,
        causal=layout.causal,
        query_index=index,
        key_index=index,
        facts=layout.facts,
        ring=ring,
    )


def take(x: Tensor, layout: TokenLayout, dim: int = 1) -> Tensor:
    """This process's tokens of a tensor that has those of the whole sequence along `dim`."""
    sequence = shared_sequence(layout)
    _check_tokens(x, dim, sequence.whole.key_count, "the whole sequence's")
    return x.index_select(dim, sequence.slots.to(x.device))


def gather(x: Tensor, layout: TokenLayout, dim: int = 1) -> Tensor:
    """The whole sequence along `dim` from the parts of all processes, in each of them; with gradients."""
    sequence = shared_sequence(layout)
    _check_tokens(x, dim, layout.key_count, "this process's")
    longest = max(chunk.count for chunk in sequence.chunks)
    parts = [x.narrow(dim, own.start, own.stop - own.start) for own, _ in sequence.pieces]
    padding = [0, 0] * (x.ndim - 1 - dim % x.ndim)
    padded = torch.stack([F.pad(part, (*padding, 0, longest - part.shape[dim])) for part in parts])
    every = sequence.in_order(gathered(padded, sequence.group))
    return torch.cat([part.narrow(dim, 0, c.count) for part, c in zip(every, sequence.chunks, strict=True)], dim)


def _check_tokens(x: Tensor, dim: int, tokens: int, whose: str) -> None:
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
        raise ValueError(f"x must have {whose} {tokens} tokens along axis {dim}, got {describe(x)}")
