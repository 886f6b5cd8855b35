"""What hides keys from queries, as kernels read it: numbers of tokens, and ranges that a block of rows sees."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from lengthwise.attention.call import AttentionCall

FAR = 2**30
"""Further than any token is from another."""

Spans = tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch query"], Bool[Tensor, "#batch query"]]


def seen_spans(call: AttentionCall) -> Spans:
    """From which key to which each query sees, and whether it sees all between; empty ones end at 0."""
    begin, end, whole = call.visibility.spans()
    mask = call.layout.key_mask
    if mask is not None and call.keys:
        # Padding at either end is cut off; where there is some between, not all is seen.
        some = mask.any(1, keepdim=True)
        first = mask.int().argmax(1, keepdim=True)
        last = (call.keys - mask.flip(1).int().argmax(1, keepdim=True)).where(some, 0)
        begin, end = torch.maximum(begin, first), torch.minimum(end, last)
        end = torch.maximum(begin, end)
        rows = max(begin.shape[0], mask.shape[0])
        counted = F.pad(mask.cumsum(1), (1, 0)).expand(rows, -1)
        seen = counted.gather(1, end.expand(rows, -1)) - counted.gather(1, begin.expand(rows, -1))
        whole = whole & (seen == end - begin)
    return begin, end.where(end > begin, 0), whole


def block_ranges(spans: Spans, keys: int, rows: int) -> Int[Tensor, "#batch block 4"]:
    """What some and what all rows of a block see."""
    begin, end, whole = spans
    short = -begin.shape[1] % rows

    def blocks(x: Tensor, beyond: int) -> Tensor:
        return F.pad(x, (0, short), value=beyond).unflatten(1, (-1, rows))

    ends = [
        blocks(begin, keys).amin(-1),
        blocks(end, 0).amax(-1),
        blocks(begin.where(whole, keys), 0).amax(-1),
        blocks(end.where(whole, 0), keys).amin(-1),
    ]
    return torch.stack(ends, -1).int()


def mask_tensors(call: AttentionCall) -> dict[str, Tensor]:
    """What hides keys: order and window as two numbers, whatever else there is as numbers of tokens."""
    layout, visibility = call.layout, call.visibility
    # In slots; with the first query's, which may be known to the device alone, between rows and columns.
    window = FAR if visibility.window is None else min(visibility.window, FAR)
    nearest = 0 if visibility.is_causal else 1 - window
    limits = torch.full((2,), window - nearest, dtype=torch.int32, device=call.q.device)
    limits[0] = nearest - layout.start
    tensors = {"bounds": limits}
    if layout.query_documents is not None and layout.key_documents is not None:
        for name in ("query_documents", "key_documents"):
            tensors[name] = getattr(layout, name).expand(call.batch, -1).contiguous()
    if layout.key_mask is not None:
        tensors["key_mask"] = layout.key_mask.expand(call.batch, -1).to(torch.int8).contiguous()
    if visibility.bands:
        query, key = (x.expand(call.batch, -1) for x in layout.indices())
        parts: dict[str, list[Tensor]] = {"band_low": [], "band_high": [], "band_key": []}
        for band in visibility.bands:
            own, other = (x.div(band.chunk, rounding_mode="floor") for x in (query, key))
            parts["band_low"].append(torch.full_like(own, -FAR) if band.farthest is None else own - band.farthest)
            parts["band_high"].append((own - band.nearest).clamp(max=FAR - 1))  # below the number of what is hidden
            parts["band_key"].append(other if band.first is None else other.where(key < band.first, FAR))
        tensors |= {name: torch.stack(x).clamp(-FAR, FAR).int().contiguous() for name, x in parts.items()}
    return tensors
