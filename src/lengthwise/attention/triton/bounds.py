"""Keys that provably cannot matter, found on the device: the first key that each block of rows has to visit, per head.

For a row i and a block of keys B behind it, in units of log 2, with m the row's logit scale or 1:

    weight of a key in B <= 2^(upper - lower),   upper = m (|q_i| max|k_B| scale + largest bias in B)

Forward `lower` is the row's score on its own key: the blocks up to B go if the sum of count_B 2^(upper - own), weighted
with max|v_B| / |v_i|, is below SMALL. Backward it is the log-sum-exp: what a row loses of d_q, of its slope and of its
logit scale is held against what its own key contributes; and what a block of keys loses of d_k, d_v and its levels, to
this block of rows and to all behind it, against what its own rows contribute. A table's gradient is compared as a
whole: far entries may become 0. NaN and infinity mean keep, and rows whose logit scale is not positive keep everything.

What is O(length) is plain torch here, what is rows x blocks of keys is bounds_kernel. Nothing is read back.
Levels that only rise need no bound of their own: the highest level of a block is then that of its last key.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton.kernels import bounds_kernel
from lengthwise.attention.triton.kernels.arguments import ROOM, Flags, Upstream
from lengthwise.attention.triton.kernels.skipping import Sides
from lengthwise.attention.triton.tiles import BOUNDED_KEYS, BOUNDED_ROWS
from lengthwise.bias import doubled_sums

SMALL = 0.25 * torch.finfo(torch.float32).eps
"""Half a unit in the last place of a number just below 1, in float32 for every precision."""

LOG2E = math.log2(math.e)

Firsts = Int[Tensor, "batch head block"]


def first_keys(
    call: AttentionCall,
    flags: Flags,
    given: dict[str, Any],
    arguments: tuple[Any, Any, Any],
    up: Upstream | None = None,
) -> Firsts | None:
    """The first key to visit by sequence, head and BOUNDED_ROWS rows; None if no block of keys lies behind a row.

    `given` is what kernels read, by name; `arguments` are those that every kernel has. The call is one that can skip.
    """
    start = int(call.layout.start)
    width = BOUNDED_KEYS * max(1, call.keys // (64 * BOUNDED_KEYS))
    count = min(call.keys, start + call.queries - 1) // width
    if count == 0:
        return None
    sides = _sides(call, flags, given, width, count)
    blocks = -(-call.queries // BOUNDED_ROWS)
    shape = (call.batch, call.heads, blocks, count)
    good, of_keys = call.q.new_zeros(shape, dtype=torch.int8), call.q.new_zeros(0, dtype=torch.float32)
    if up is not None:
        sides, own = _with_upstream(call, sides, up, given.get("slope"), width, count)
        of_keys = call.q.new_zeros((3, *shape), dtype=torch.float32)
    t, z, kernel_flags = arguments
    extra: dict[str, Any] = {"F": kernel_flags, "BACKWARD": up is not None, "ROWS": BOUNDED_ROWS}
    extra |= {"num_warps": 2, "num_stages": 1}
    bounds_kernel[blocks, call.heads, call.batch](t, z, sides, good, of_keys, count, width, SMALL, **extra)
    is_good = good.bool()
    if up is not None:
        # A block of keys loses to this block of rows and to all behind it.
        lost = doubled_sums(of_keys.transpose(-1, -2).flip(-1)).flip(-1).transpose(-1, -2)
        is_good = is_good & (lost <= SMALL * own[:, :, :, None]).all(0)
    ends = torch.arange(1, count + 1, device=good.device) * width
    slots = start + BOUNDED_ROWS * torch.arange(blocks, device=good.device)
    is_good = is_good & (ends <= slots[:, None])
    return (is_good.long().cumprod(-1).sum(-1) * width).int()


def by_tile(firsts: Firsts, rows: int, blocks: int) -> Firsts:
    """The same for blocks of other sizes."""
    if rows < BOUNDED_ROWS:
        return firsts.repeat_interleave(BOUNDED_ROWS // rows, -1)[..., :blocks].contiguous()
    wanted = blocks * rows // BOUNDED_ROWS - firsts.shape[-1]
    return F.pad(firsts, (0, wanted), value=torch.iinfo(torch.int32).max).unflatten(-1, (blocks, -1)).amin(-1)


def share_skipped(call: AttentionCall, firsts: Firsts | None) -> float:
    """How much of the work that causality leaves is skipped, 0 to 1; reads values back."""
    if firsts is None:
        return 0.0
    start = int(call.layout.start)
    last_rows = (min(row + BOUNDED_ROWS, call.queries) for row in range(0, call.queries, BOUNDED_ROWS))
    ends = [min(call.keys, start + row) for row in last_rows]
    return float(firsts.double().sum()) / max(1, sum(ends) * call.batch * call.heads)


def _sides(call: AttentionCall, flags: Flags, given: dict[str, Any], width: int, count: int) -> Sides:
    """What is known of the rows and of the blocks of keys."""
    start = int(call.layout.start)
    rows = slice(start, start + call.queries)
    kv_heads = call.k.shape[1]

    def blocks(x: Tensor) -> Tensor:
        return x[..., : count * width].unflatten(-1, (count, width))

    def of_heads(x: Tensor) -> Tensor:
        """Of each head of the queries, and where they lie close."""
        return x[:, :, None].expand(-1, -1, call.group, *x.shape[2:]).flatten(1, 2).contiguous()

    q_length, k_length, v_length = (
        torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (call.q, call.k, call.v)
    )
    by_group = call.q.unflatten(1, (kv_heads, call.group)).float() * call.k[:, :, None, rows].float()
    own = by_group.sum(-1).flatten(1, 2) * (call.scale * LOG2E)
    highest = top = top_rest = factor = None
    if flags.TABLE:
        strip = given["table"]
        highest = strip.flip(-1).cummax(-1).values.flip(-1).contiguous()
        own = own + strip[:, :, ROOM.value + call.keys - 1 - start, None]
    if flags.LEVEL:
        high, rest = given["key_level"], given["key_rest"]
        rise = (given["query_level"] - high[..., rows]) + (given["query_rest"] - rest[..., rows])
        own = own - given["slope"] * rise.abs()
        top = blocks(high).amax(-1)
        top_rest = blocks(rest).masked_fill(blocks(high) < top[..., None], -math.inf).amax(-1)
    if call.logit_scale is not None:
        own = own * given["logit_scale"]
        # A bound that is not positive is none: it becomes NaN, which means keep.
        factor = given["logit_scale"].where(given["logit_scale"] > 0, math.nan).contiguous()
    counts = call.q.new_full((call.batch, count), width, dtype=torch.float32)
    own_k, own_v = (of_heads(x[:, :, rows]) for x in (k_length, v_length))
    if (mask := call.layout.key_mask) is not None:
        seen = mask.expand(call.batch, -1)[:, None]
        counts = blocks(seen[:, 0].float()).sum(-1)
        own = own.masked_fill(~seen[:, :, rows], -math.inf)
        k_length, v_length = k_length * seen, v_length * seen
    return Sides(
        q=(q_length * (abs(call.scale) * LOG2E)).contiguous(),
        own=own.contiguous(),
        own_k=own_k,
        own_v=own_v,
        factor=factor,
        longest_k=blocks(k_length).amax(-1).contiguous(),
        longest_v=blocks(v_length).amax(-1).contiguous(),
        counts=counts.contiguous(),
        highest=highest,
        top=top,
        top_rest=top_rest,
        lse=None,
        above=None,
        delta=None,
        row=None,
    )


def _with_upstream(
    call: AttentionCall, sides: Sides, up: Upstream, slope: Tensor | None, width: int, count: int
) -> tuple[Sides, Float[Tensor, "3 batch head block"]]:
    """With what the backward pass knows of rows; and what every block of keys has of its own rows: d_v, d_k, level."""
    start = int(call.layout.start)
    above, delta = torch.linalg.vector_norm(up.d_out, dim=-1, dtype=torch.float32), up.drop.abs()
    weight = torch.exp2(sides.own - up.lse)
    row = weight * (above * sides.own_v + delta)
    steepness = torch.ones_like(row) if slope is None else slope
    factor = 1.0 if sides.factor is None else sides.factor
    own = torch.stack([weight * above, row * sides.q * factor, row * steepness * factor])
    # 0 for keys that have no row.
    of_keys = F.pad(own, (start, call.keys - start - call.queries))[..., : count * width]
    largest = of_keys.unflatten(-1, (count, width)).amax(-1)
    return sides._replace(lse=up.lse, above=above, delta=delta, row=row), largest
