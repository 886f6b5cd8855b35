"""A call's mask for FlexAttention: blocks that are left out or taken whole, and one pair at a time in the others."""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.flex.lookups import Entry, number, per_pair, per_sequence, room, static
from lengthwise.token_layout import TokenLayout

BLOCK = 128
"""Blocks of queries and keys that the kernel leaves out, masks, or takes whole."""
FAR = 2**31
"""No end of a band."""

Ends = tuple[Int[Tensor, "#batch block"], Int[Tensor, "#batch block"]]
"""The least and the greatest number of each block."""

_block_masks: WeakKeyDictionary[TokenLayout, dict[tuple[object, ...], BlockMask]] = WeakKeyDictionary()
"""The layers of one pass share a layout and nothing else that they could hand on: a plan is made for every call."""


def block_mask(call: AttentionCall) -> BlockMask:
    """The call's mask, made once for the layers of a pass."""
    if torch.compiler.is_compiling():
        return _make_block_mask(call)
    visibility = call.visibility
    made = _block_masks.setdefault(call.layout, {})
    # A tensor of inference mode is no good outside of it.
    key = (visibility.window, visibility.bands, call.batch, call.needs_grad, torch.is_inference_mode_enabled())
    if key not in made:
        made[key] = _make_block_mask(call)
    return made[key]


def _make_block_mask(call: AttentionCall) -> BlockMask:
    """From what is known of blocks, and so in memory of one number for each pair of blocks."""
    some, whole = visible_blocks(call)
    partial_count, partial = _listed(some & ~whole)
    whole_count, whole = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        whole_count,
        whole,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_entry(call),
        seq_lengths=(call.queries, call.keys),
        compute_q_blocks=call.needs_grad,
    )


def mask_entry(call: AttentionCall) -> Entry:
    """The call's mask, one pair at a time."""
    layout, visibility = call.layout, call.visibility
    start, causal = number(layout.start, call), visibility.is_causal
    window = None if visibility.window is None else number(visibility.window, call)
    key_mask = None if layout.key_mask is None else per_sequence(layout.key_mask, call)
    mask = None if layout.mask is None else per_pair(layout.mask, call)
    ends = [(band.nearest, band.farthest, band.first, band.chunk) for band in visibility.bands]
    bands = tuple(tuple(number(FAR if end is None else end, call) for end in of_band) for of_band in ends)
    documents = indices = None
    if layout.query_documents is not None and layout.key_documents is not None:
        documents = tuple(per_sequence(x, call) for x in (layout.query_documents, layout.key_documents))
    if bands:
        indices = tuple(per_sequence(x, call) for x in layout.indices())

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slot = start + i
        seen = j <= slot if causal else j >= 0
        if window is not None:
            seen = seen & (slot - j < window) & (j - slot < window)
        if documents is not None:
            seen = seen & (documents[0][b, i] == documents[1][b, j])
        if key_mask is not None:
            seen = seen & key_mask[b, j]
        if mask is not None:
            seen = seen & mask[b, h, i, j]
        if indices is None:
            return seen
        query, key = indices[0][b, i], indices[1][b, j]
        inside = j < 0
        for nearest, farthest, first, chunk in bands:
            distance = query // chunk - key // chunk
            inside = inside | ((distance >= nearest) & (distance < farthest) & (key < first))
        return seen & inside

    return visible


def visible_blocks(
    call: AttentionCall,
) -> tuple[Bool[Tensor, "#batch #head row column"], Bool[Tensor, "#batch #head row column"]]:
    """Blocks that may have a pair that is seen, and blocks whose pairs all are."""
    layout, visibility, device = call.layout, call.visibility, call.q.device
    query = _ends((layout.start + torch.arange(call.queries, device=device))[None])
    key = _ends(torch.arange(call.keys, device=device)[None])
    # Blocks that are not complete are not whole: the kernel looks beyond the ends of those.
    complete = _is_complete(call.queries, query[0])[..., None] & _is_complete(call.keys, key[0])[:, None]
    some, whole = torch.ones_like(complete), complete
    nearest, farthest = _between(query, key)
    if visibility.is_causal:
        some, whole = some & (farthest >= 0), whole & (nearest >= 0)
    if (window := visibility.window) is not None:
        some = some & (farthest > -window) & (nearest < window)
        whole = whole & (nearest > -window) & (farthest < window)
    if layout.query_documents is not None and layout.key_documents is not None:
        nearest, farthest = _between(_ends(layout.query_documents), _ends(layout.key_documents))
        some, whole = some & (nearest <= 0) & (farthest >= 0), whole & (nearest == 0) & (farthest == 0)
    if layout.key_mask is not None:
        least, most = _ends(layout.key_mask.long())
        some, whole = some & (most[:, None] > 0), whole & (least[:, None] > 0)
    if visibility.bands:
        in_some, in_whole = _in_bands(call)
        some, whole = some & in_some, whole & in_whole
    some, whole = some[:, None], whole[:, None]
    if layout.mask is not None:
        least, most = _ends_of_pairs(layout.mask)
        some, whole = some & most, whole & least
    return some, whole


def _in_bands(call: AttentionCall) -> tuple[Tensor, Tensor]:
    query, key = (_ends(x) for x in call.layout.indices())
    some = whole = torch.zeros((), dtype=torch.bool, device=call.q.device)
    for band in call.visibility.bands:
        chunk = band.chunk
        nearest, farthest = _between(*((x[0] // chunk, x[1] // chunk) for x in (query, key)))
        own_some, own_whole = farthest >= band.nearest, nearest >= band.nearest
        if band.farthest is not None:
            own_some, own_whole = own_some & (nearest < band.farthest), own_whole & (farthest < band.farthest)
        if band.first is not None:
            own_some, own_whole = own_some & (key[0] < band.first)[:, None], own_whole & (key[1] < band.first)[:, None]
        some, whole = some | own_some, whole | own_whole
    return some, whole


def _ends(x: Int[Tensor, "#batch position"]) -> Ends:
    """The least and the greatest of each block; the last one is filled up with its last number."""
    length = x.shape[1]
    filled = torch.arange(-(-length // BLOCK) * BLOCK, device=x.device).clamp(max=length - 1)
    blocks = x[:, filled].unflatten(1, (-1, BLOCK))
    return blocks.amin(2), blocks.amax(2)


def _is_complete(length: int, like: Tensor) -> Bool[Tensor, "1 block"]:
    return (torch.arange(like.shape[1], device=like.device) < length // BLOCK)[None]


def _between(query: Ends, key: Ends) -> tuple[Tensor, Tensor]:
    """The least and the greatest difference of a number of a block of queries and one of a block of keys."""
    return query[0][..., None] - key[1][:, None], query[1][..., None] - key[0][:, None]


def _ends_of_pairs(mask: Bool[Tensor, "#batch #head query key"]) -> tuple[Tensor, Tensor]:
    rows, columns = ((-length) % BLOCK for length in mask.shape[2:])
    blocks = F.pad(mask, (0, columns, 0, rows)).unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.all(5).all(3), blocks.any(5).any(3)


def _listed(blocks: Bool[Tensor, "#batch #head row column"]) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their columns first of all; with room for more, so that kernels are shared."""
    sizes = (blocks.shape[3], blocks.shape[2])
    missing = [size for count in sizes for size in (0, room(count * BLOCK) // BLOCK - count)]
    marked = F.pad(blocks, missing).int()
    counts, columns = marked.sum(3).int(), marked.argsort(dim=3, descending=True, stable=True).int()
    return static(counts), static(columns)
