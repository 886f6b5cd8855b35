"""FlexAttention: one function per kind of bias, compiled by torch into one fused kernel.

Made for CUDA, where it also trains; untested there. On the CPU torch compiles its forward pass only, without the
log-sum-exp.

Lengths are open in a kernel, but what its functions look up has as many entries as the next power of two (`_room`): a
kernel serves all lengths up to it, and torch's CPU kernel cannot be compiled with open lookups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    SumBias,
    at_least_float32,
    two_floats,
)
from lengthwise.token_layout import TokenLayout

BLOCK = 128
"""Blocks of queries and keys that the kernel leaves out, masks, or takes whole."""
LEAST_ROOM = 512
FAR = 2**31
"""No end of a band."""
KERNELS = 1024
"""Every kind of bias, mask and room is a kernel of its own; past dynamo's own limit it would fall back unseen."""

Entry = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""entry(batch, head, query, key) of a bias or a mask, all of them single numbers to the compiler."""

Ends = tuple[Int[Tensor, "#batch block"], Int[Tensor, "#batch block"]]
"""The least and the greatest number of each block."""

_block_masks: WeakKeyDictionary[TokenLayout, dict[tuple[object, ...], BlockMask]] = WeakKeyDictionary()
"""The layers of one pass share a layout and nothing else that they could hand on: a plan is made for every call."""


@dataclass(frozen=True)
class FlexPlan(Plan):
    """The terms of the bias, which are added one after the other."""

    terms: tuple[Bias, ...]


def plan(call: AttentionCall) -> FlexPlan | Refusal:
    """Everything that can be said of one query and one key."""
    terms = () if call.bias is None else tuple(_flattened(call.bias))
    reasons = [
        f"a {type(term).__name__} is computed tile by tile, flex asks for one score at a time"
        for term in terms
        if type(term) not in ENTRIES
    ]
    if call.rescore is not None:
        reasons.append("rescore needs whole rows of all heads, flex shows one score at a time")
    if call.dtype == torch.float64:
        reasons.append("FlexAttention has no float64 kernel")
    if 0 in call.q.shape or 0 in call.v.shape:
        reasons.append("FlexAttention needs a query and a key")
    if call.q.device.type == "meta":
        reasons.append("FlexAttention has no kernel for tensors without numbers")
    if call.q.device.type == "cpu":
        if call.needs_grad:
            reasons.append("FlexAttention has no backward pass on the CPU")
        if call.q.shape[3] != call.v.shape[3]:
            reasons.append("FlexAttention on the CPU wants values as wide as queries")
        if call.return_lse or call.sink is not None:
            reasons.append("FlexAttention does not give the log-sum-exp on the CPU, which a sink needs too")
    return Refusal(tuple(reasons)) if reasons else FlexPlan(terms)


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp; scores are float32 inside the kernel whatever the dtype."""
    assert isinstance(plan, FlexPlan)
    clean, taint = finite_inputs(call)
    wants_lse = call.return_lse or call.sink is not None
    found = _attention(
        clean.q,
        clean.k,
        clean.v,
        score_mod=_score(call, plan.terms),
        block_mask=_block_mask(call) if call.visibility.hides else None,
        scale=call.scale,
        enable_gqa=call.group > 1,
        return_aux=AuxRequest(lse=True) if wants_lse else None,
    )
    out, lse = (found[0], found[1].lse) if wants_lse else (found, None)
    if call.sink is not None:
        assert lse is not None
        sink = at_least_float32(call.sink)
        share = (lse - sink).masked_fill(lse == -torch.inf, -torch.inf).sigmoid()
        out, lse = (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)
    if taint is not None:
        out, lse = out + taint[..., None].to(out.dtype), None if lse is None else lse + taint
    return out, lse


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": KERNELS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        return _kernel()(q, k, v, **options)


@cache
def _kernel() -> Callable[..., Any]:
    """flex_attention compiled for any length; uncompiled it fills in the whole matrix."""
    return torch.compile(flex_attention, dynamic=True)


def _flattened(bias: Bias) -> list[Bias]:
    return [own for term in bias.terms for own in _flattened(term)] if isinstance(bias, SumBias) else [bias]


def _score(call: AttentionCall, terms: tuple[Bias, ...]) -> Callable[..., Tensor] | None:
    """logit_scale (softcap(content) + bias); None where it is the content."""
    if not terms and call.softcap is None and call.logit_scale is None:
        return None
    entries = tuple(ENTRIES[type(term)](term, call) for term in terms)
    softcap = None if call.softcap is None else torch.full((), call.softcap, dtype=torch.float32, device=call.q.device)
    factor = None if call.logit_scale is None else _per_head(at_least_float32(call.logit_scale), call)

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            content = softcap * torch.tanh(content / softcap)
        for entry in entries:
            content = content + entry(b, h, i, j)
        return content if factor is None else content * factor[b, h, i]

    return score


def distance_entry(bias: DistanceBias, call: AttentionCall) -> Entry:
    """table[h, query - key - first]."""
    table = _static(_looked_up(at_least_float32(bias.table)).expand(call.heads, -1))
    query, key = _per_sequence(bias.query, call), _per_sequence(bias.key, call)
    first, last = (_number(x, call) for x in (bias.first, bias.table.shape[1] - 1))

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b, i] - key[b, j] - first
        return table[h, distance.clamp(min=0).minimum(last)]

    return entry


def profile_entry(bias: QueryDistanceBias, call: AttentionCall) -> Entry:
    """rows . profiles[:, query - key - first], profile by profile."""
    rows = _looked_up(at_least_float32(bias.rows).transpose(2, 3)).expand(call.batch, call.heads, -1, -1)
    profiles = _looked_up(at_least_float32(bias.profiles)).expand(call.heads, -1, -1)
    rows, profiles = _static(rows), _static(profiles)
    query, key = _per_sequence(bias.query, call), _per_sequence(bias.key, call)
    first, last = (_number(x, call) for x in (bias.first, bias.profiles.shape[2] - 1))
    count, of_queries, is_zero = bias.profiles.shape[1], bias.side == "query", bias.beyond == "zero"

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b, i] - key[b, j] - first
        index, token = distance.clamp(min=0).minimum(last), i if of_queries else j
        total = rows[b, h, 0, token] * profiles[h, 0, index]
        for n in range(1, count):
            total = total + rows[b, h, n, token] * profiles[h, n, index]
        return torch.where(distance == index, total, 0.0) if is_zero else total

    return entry


def level_entry(bias: LevelBias, call: AttentionCall) -> Entry:
    """-slope curve(|query_level - key_level|); a float64 level is two float32, so that kernels stay in float32."""
    bias = bias.summed()
    levels = ((bias.query_level, bias.query_rest), (bias.key_level, bias.key_rest))
    parts: list[Tensor] = []
    for level, rest in levels:
        assert level is not None
        parts += two_floats(level) if rest is None else (level, rest)
    query, query_rest, key, key_rest = (_per_head(part, call) for part in parts)
    slope = _per_head(at_least_float32(bias.slope).expand(-1, -1, call.queries), call)
    linear = bias.curve == "linear"

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        difference = (query[b, h, i] - key[b, h, j]) + (query_rest[b, h, i] - key_rest[b, h, j])
        return -slope[b, h, i] * (difference.abs() if linear else torch.log1p(difference * difference))

    return entry


def line_entry(bias: LineBias, call: AttentionCall) -> Entry:
    """slope[h, n] x + intercept[h, n], with n counted knot by knot."""
    curve, factor = distance_entry(bias.curve, call), _per_sequence(at_least_float32(bias.factor), call)
    knots = _static(at_least_float32(bias.knots))
    slope, intercept = (_static(at_least_float32(x).expand(call.heads, -1)) for x in (bias.slope, bias.intercept))
    count = bias.knots.shape[0]

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = factor[b, i] * curve(b, h, i, j)
        line = torch.zeros_like(i)
        for knot in range(count):
            line = line + (x >= knots[knot])
        return slope[h, line] * x + intercept[h, line]

    return entry


def dense_entry(bias: DenseBias, call: AttentionCall) -> Entry:
    """value[b, h, i, j]."""
    value = _per_pair(at_least_float32(bias.value), call)

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return value[b, h, i, j]

    return entry


ENTRIES: dict[type[Bias], Callable[..., Entry]] = {
    DistanceBias: distance_entry,
    QueryDistanceBias: profile_entry,
    LevelBias: level_entry,
    LineBias: line_entry,
    DenseBias: dense_entry,
}


def _room(length: int) -> int:
    """The next power of two; a compiled graph of any length looks up as many entries as there are."""
    return length if torch.compiler.is_compiling() else max(LEAST_ROOM, 1 << (length - 1).bit_length())


def _looked_up(x: Tensor, axes: int = 1) -> Tensor:
    """With room along the last axes."""
    return F.pad(x, [size for length in x.shape[: -axes - 1 : -1] for size in (0, _room(length) - length)])


def _static(x: Tensor) -> Tensor:
    """Of a size that the kernel may know. The mark stays on a tensor, so it is put on another one of the same."""
    if not torch.compiler.is_compiling():
        x = x.view_as(x)
        torch._dynamo.mark_static(x)
    return x


def _per_sequence(x: Tensor, call: AttentionCall) -> Tensor:
    return _static(_looked_up(x).expand(call.batch, -1))


def _per_head(x: Tensor, call: AttentionCall) -> Tensor:
    return _static(_looked_up(x).expand(call.batch, call.heads, -1))


def _per_pair(x: Tensor, call: AttentionCall) -> Tensor:
    return _static(_looked_up(x, axes=2).expand(call.batch, call.heads, -1, -1))


def _number(x: int | Tensor, call: AttentionCall) -> Tensor:
    """As a tensor: a kernel would know a plain number, or torch's CPU kernel could not be compiled with an open one."""
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=call.q.device)


def _block_mask(call: AttentionCall) -> BlockMask:
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
    some, whole = _blocks(call)
    partial_count, partial = _listed(some & ~whole)
    whole_count, whole = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        whole_count,
        whole,
        BLOCK_SIZE=BLOCK,
        mask_mod=_visible(call),
        seq_lengths=(call.queries, call.keys),
        compute_q_blocks=call.needs_grad,
    )


def _visible(call: AttentionCall) -> Entry:
    """The call's mask, one pair at a time."""
    layout, visibility = call.layout, call.visibility
    start, causal = _number(layout.start, call), visibility.is_causal
    window = None if visibility.window is None else _number(visibility.window, call)
    key_mask = None if layout.key_mask is None else _per_sequence(layout.key_mask, call)
    mask = None if layout.mask is None else _per_pair(layout.mask, call)
    ends = [(band.nearest, band.farthest, band.first, band.chunk) for band in visibility.bands]
    bands = tuple(tuple(_number(FAR if end is None else end, call) for end in of_band) for of_band in ends)
    documents = indices = None
    if layout.query_documents is not None and layout.key_documents is not None:
        documents = tuple(_per_sequence(x, call) for x in (layout.query_documents, layout.key_documents))
    if bands:
        indices = tuple(_per_sequence(x, call) for x in layout.indices())

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


def _blocks(
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
    room = [size for count in (blocks.shape[3], blocks.shape[2]) for size in (0, _room(count * BLOCK) // BLOCK - count)]
    marked = F.pad(blocks, room).int()
    counts, columns = marked.sum(3).int(), marked.argsort(dim=3, descending=True, stable=True).int()
    return _static(counts), _static(columns)
