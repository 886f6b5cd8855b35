"""Which blocks of keys have no weight: they are neither sent nor computed.

A segment is cut into tiles of keys. A tile is left out for a head where, of every row,

    m (|q| max|k| scale + largest bias in the tile) - lse of near keys < log(half of the smallest float32)

m is the row's logit scale. Then every weight in it is 0 in float32, forward and backward: nothing changes. What bounds
the scores of a tile is gathered before any key is sent.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from lengthwise.bias import at_least_float32, block_peaks
from lengthwise.distributed.call import Block, RingCall
from lengthwise.distributed.collectives import gather_all
from lengthwise.distributed.sharding import Chunk

TILES = 64
"""Into how many tiles a segment is cut at most."""
TILE_KEYS = 64
"""How many keys a tile has at least."""
ROWS = 128
"""For how many rows bounds are worked out at a time."""

Peaks = dict[str, list[Tensor]]
"""What bounds the scores of the tiles of each segment, by name and by the number of the segment."""


def gather_peaks(call: RingCall, named: Mapping[str, Tensor]) -> Peaks | None:
    """Of all segments; None where nothing bounds the bias, which depends on its kind and on what all processes have."""
    if call.bias is None:
        return None
    sequence, (width, count) = call.sequence, tiles(call)
    by_segment = []
    for segment in (sequence.segments[number] for number in sequence.own_segments):
        picked = {name: x[call.index(name, x, key=segment.own)] for name, x in named.items()}
        positions = sequence.whole.key[:, segment.slots]
        bias = call.described(picked, positions, positions)
        peaks = None if bias is None else bias.key_peaks(width, count)
        if peaks is None:
            return None
        # A weight of 0 hides no value that is not finite: NaN is kept like a key that is not.
        lengths = at_least_float32(picked["k"]).norm(dim=-1).where(picked["v"].isfinite().all(-1), torch.nan)
        by_segment.append({"k": block_peaks(lengths, width, count).clamp(min=0), **peaks})
    every = {
        name: gather_all(torch.stack([peaks[name] for peaks in by_segment]), sequence.group) for name in by_segment[0]
    }
    # As many segments of each chunk.
    return {
        name: [own for of_chunk in sequence.in_order(x.unflatten(1, (2, -1))) for own in of_chunk]
        for name, x in every.items()
    }


def tiles(call: RingCall) -> tuple[int, int]:
    """How many keys a tile has, and how many tiles a segment."""
    longest = max(segment.count for segment in call.sequence.segments)
    width = max(TILE_KEYS, -(-longest // TILES))
    return width, -(-longest // width)


def with_weight(call: RingCall, block: Block, named: Mapping[str, Tensor], lse: Tensor, peaks: Peaks) -> list[Block]:
    """The parts of a block that may have weight: heads that need about as many keys of the segment together."""
    width, _ = tiles(call)
    query, key = call.sequence.segments[block.query], call.sequence.segments[block.key]
    needed = tiles_with_weight(call, block, named, lse, peaks)
    last = -(-(block.keys.stop - key.first) // width)
    needed[..., last:] = False
    needed[..., : (block.keys.start - key.first) // width] = False
    firsts = needed.any(1).int().argmax(-1).tolist()
    used = needed.flatten(1).any(1).tolist()
    # Twice as many keys at most as a head needs, so that there are few calls.
    tails = {head: 1 << (last - firsts[head] - 1).bit_length() for head, is_used in enumerate(used) if is_used}
    parts = []
    for tail in sorted(set(tails.values())):
        heads = tuple(head for head, own in tails.items() if own == tail)
        rows = needed[list(heads)].any(0).any(-1).nonzero()
        parts.append(
            Block(
                block.query,
                slice(query.first + int(rows[0]), query.first + int(rows[-1]) + 1),
                block.key,
                slice(max(block.keys.start, key.first + (last - tail) * width), block.keys.stop),
                heads if len(heads) < len(used) else None,
            )
        )
    return parts


def tiles_with_weight(
    call: RingCall, block: Block, named: Mapping[str, Tensor], lse: Tensor, peaks: Peaks
) -> Bool[Tensor, "kv_head row tile"]:
    """Where a row of a block's segment of queries may have weight in a tile of keys; NaN and infinity mean it may.

    `lse` is that of each row with the keys near it, and so at most that of all keys.
    """
    segment, of_keys = call.sequence.segments[block.query], {name: x[block.key] for name, x in peaks.items()}
    # Some rows at a time: the bounds of all rows would take as much memory as their keys.
    borders = [*range(segment.first, segment.stop, ROWS), segment.stop]
    parts = [_with_weight(call, segment, slice(*rows), named, lse, of_keys) for rows in pairwise(borders)]
    return torch.cat(parts, 1)


def _with_weight(
    call: RingCall,
    segment: Chunk,
    rows: slice,
    named: Mapping[str, Tensor],
    lse: Tensor,
    peaks: Mapping[str, Tensor],
) -> Bool[Tensor, "kv_head row tile"]:
    own = segment.local(rows)
    picked = {name: x[call.index(name, x, query=own)] for name, x in named.items()}
    positions = call.sequence.whole.query[:, rows]
    bias = call.described(picked, positions, positions)
    assert bias is not None
    lengths = at_least_float32(picked["q"]).norm(dim=-1) * abs(call.scale)
    content = lengths[..., None] * peaks["k"].repeat_interleave(call.heads_per_key, 1)[:, :, None]
    ceiling = bias.ceiling(peaks)
    lse = lse[:, :, own, None]
    # What the bound itself may be rounded down by: a few units in the last place of each of its numbers.
    unit = 8 * torch.finfo(lse.dtype).eps
    upper = content + ceiling + unit * (content + ceiling.abs())
    if "logit_scale" in picked:
        factor = at_least_float32(picked["logit_scale"])[..., None]
        upper = upper * factor.where(factor > 0, torch.nan)
    # As a sum: half of the smallest float64 is 0 in Python's own numbers.
    smallest = math.log(torch.finfo(lse.dtype).smallest_normal) + math.log(torch.finfo(lse.dtype).eps) - math.log(2)
    needed = ~(upper - lse < smallest - 1 - unit * (upper.abs() + lse.abs()))
    return needed.any(0).unflatten(0, (-1, call.heads_per_key)).any(1)
