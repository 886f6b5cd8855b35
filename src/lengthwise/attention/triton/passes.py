"""What runs inside the operators: the launches for a call, forward and backward.

Nothing here reads a value back from the device, and nothing is of torch's operations whose result depends on the order
in which threads come: sums are reductions, and what is read by index is never written by index.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.backend import merge_stacked
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton import bounds
from lengthwise.attention.triton.bounds import LOG2E
from lengthwise.attention.triton.inputs import KernelInputs, power_of_2
from lengthwise.attention.triton.kernels import (
    bands_kernel,
    drop_kernel,
    entries_kernel,
    forward_kernel,
    keys_kernel,
    rows_kernel,
)
from lengthwise.attention.triton.kernels.arguments import Upstream
from lengthwise.attention.triton.kernels.backward import KeyGradients, RowGradients
from lengthwise.attention.triton.terms import can_skip
from lengthwise.attention.triton.tiles import BOUNDED_KEYS, BOUNDED_ROWS, FEW_ROWS, Tile, shares_of_keys
from lengthwise.bias import DistanceBias

RANGES_AT_ONCE = 128


def forward(call: AttentionCall, notes: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp in float32, of keys and values that are finite where they are hidden."""
    inputs = KernelInputs(call, notes)
    few = call.queries <= FEW_ROWS
    tile = inputs.tile("decode" if few else "forward")
    shares = 1
    blocks = triton.cdiv(call.queries, tile.rows)
    if few:
        programs = call.batch * call.heads * blocks
        shares = notes.get("shares") or shares_of_keys(programs, triton.cdiv(call.keys, tile.keys), call.q.device)
    out = call.q.new_zeros(shares, *inputs.shape, call.v.shape[3], dtype=torch.float32)
    lse = call.q.new_full((shares, *inputs.shape), -math.inf, dtype=torch.float32)
    if call.q.numel() and call.keys:
        given, sizes, flags = inputs.arguments(tile, None if few else first_keys(inputs))
        grid = blocks if shares == 1 else shares, call.heads, call.batch
        forward_kernel[grid](given, sizes, out, lse, F=flags, SHARED=shares > 1, **_options(tile))
    elif call.sink is not None:
        lse = inputs.given["sink"][None].clone()
    return (out[0], lse[0]) if shares == 1 else merge_stacked(out, lse)


def backward(
    call: AttentionCall, notes: Mapping[str, int], d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """The gradients of q, k and v and of what else is learned, by name."""
    inputs, queries, keys = KernelInputs(call, notes), call.queries, call.keys
    up = _upstream(inputs, d_out, d_lse, out, lse)
    tile = inputs.tile("rows")
    blocks = triton.cdiv(queries, tile.rows)
    to_rows, to_keys = _row_gradients(inputs, blocks), _key_gradients(inputs)
    firsts = None
    if call.q.numel() and keys:
        firsts = first_keys(inputs, up)
        profiles = power_of_2(max(inputs.flags.PROFILES, 1))
        given, sizes, flags = inputs.arguments(tile, firsts)
        power = power_of_2(max(inputs.flags.LINES, 1))
        extra = {"F": flags, "LINES": power, "PROFILES": profiles}
        rows_kernel[blocks, call.heads, call.batch](given, sizes, up, to_rows, **extra, **_options(tile))
        tile = inputs.tile("keys")
        given, sizes, flags = inputs.arguments(tile, firsts)
        extra = {"F": flags, "PROFILES": profiles, "AT_ONCE": RANGES_AT_ONCE}
        grid = triton.cdiv(keys, tile.keys), call.k.shape[1], call.batch
        keys_kernel[grid](given, sizes, up, to_keys, **extra, **_options(tile))
    gradients: dict[str, Any] = {"q": to_rows.d_q, "k": to_keys.d_k, "v": to_keys.d_v}
    if call.logit_scale is not None:
        gradients["logit_scale"] = to_rows.d_logit
    if call.sink is not None:
        gradients["sink"] = -(inputs.given["sink"] * LOG2E - up.lse).exp2() * up.drop
    gradients |= _term_gradients(inputs, up, to_rows, to_keys, firsts)
    tensors = call.tensors()
    return {name: x.sum_to_size(tensors[name].shape).to(tensors[name].dtype) for name, x in gradients.items()}


def skipped_share(call: AttentionCall, notes: Mapping[str, int]) -> float:
    """How much of the forward work that causality leaves is skipped, 0 to 1; reads values back."""
    return bounds.share_skipped(call, first_keys(KernelInputs(call, notes)))


def skips(call: AttentionCall, notes: Mapping[str, int]) -> bool:
    """Whether keys are skipped, forward and backward; reads values back."""
    inputs = KernelInputs(call, notes)
    out, lse = forward(call, notes)
    up = _upstream(inputs, torch.ones_like(out), torch.zeros_like(lse), out, lse)
    both = first_keys(inputs), first_keys(inputs, up)
    return all(firsts is not None and bool((firsts > 0).any()) for firsts in both)


def first_keys(inputs: KernelInputs, up: Upstream | None = None) -> bounds.Firsts | None:
    """The first key that every block of rows has to visit; None if nothing can be skipped."""
    follows_slots = all(inputs.offsets)
    if not can_skip(inputs.call, inputs.terms, follows_slots=follows_slots, shortest=inputs.shortest):
        return None
    arguments = inputs.arguments(Tile(BOUNDED_ROWS, BOUNDED_KEYS, 2, 1), None)
    return bounds.first_keys(inputs.call, inputs.flags, inputs.given, arguments, up)


def _upstream(inputs: KernelInputs, d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor) -> Upstream:
    call, empty = inputs.call, lse == -math.inf
    up = Upstream(
        d_out.to(call.dtype).contiguous(),
        (lse * LOG2E).masked_fill(empty, math.inf).contiguous(),
        -d_lse.float().masked_fill(empty, 0).contiguous(),
    )
    # What is learned beside q, k and v may be float32 where they are not.
    others = [x for name, x in call.tensors().items() if name not in ("q", "k", "v")]
    if call.dtype == torch.float32 or not any(x.requires_grad for x in others):
        return up._replace(drop=((d_out.float() * out).sum(-1) + up.drop).masked_fill(empty, 0).contiguous())
    drop = torch.zeros_like(up.drop)
    if call.q.numel() and call.keys:
        tile = inputs.tile("rows")
        given, sizes, flags = inputs.arguments(tile, first_keys(inputs))
        grid = triton.cdiv(call.queries, tile.rows), call.heads, call.batch
        drop_kernel[grid](given, sizes, up, drop, F=flags, **_options(tile))
    else:
        drop = up.drop
    return up._replace(drop=drop)


def _row_gradients(inputs: KernelInputs, blocks: int) -> RowGradients:
    call, flags = inputs.call, inputs.flags
    wanted = {"d_logit": flags.LOGIT, "d_slope": flags.LEVEL, "d_level": flags.LEVEL, "d_factor": flags.LINE}
    tensors: dict[str, Any] = dict.fromkeys(RowGradients._fields)
    tensors |= {name: call.q.new_zeros(inputs.shape, dtype=torch.float32) for name, is_on in wanted.items() if is_on}
    if flags.LINE:
        shape = (call.batch * call.heads, blocks, flags.LINES)
        tensors |= {name: call.q.new_zeros(shape, dtype=torch.float32) for name in ("d_line_slope", "d_line_start")}
    if inputs.terms.profile is not None and inputs.terms.profile[1].side == "query":
        tensors["d_mixes"] = call.q.new_zeros(*inputs.shape, flags.PROFILES, dtype=torch.float32)
    tensors["d_q"] = call.q.new_zeros(call.q.shape)
    return RowGradients(**tensors)


def _key_gradients(inputs: KernelInputs) -> KeyGradients:
    call, flags = inputs.call, inputs.flags
    shape = (call.batch, call.heads, call.keys)
    tensors: dict[str, Any] = dict.fromkeys(KeyGradients._fields)
    tensors |= {"d_k": call.k.new_zeros(call.k.shape), "d_v": call.v.new_zeros(call.v.shape)}
    if flags.LEVEL:
        tensors["d_level"] = call.q.new_zeros(shape, dtype=torch.float32)
    if inputs.terms.profile is not None and inputs.terms.profile[1].side == "key":
        tensors["d_mixes"] = call.q.new_zeros(*shape, flags.PROFILES, dtype=torch.float32)
    return KeyGradients(**tensors)


def _term_gradients(
    inputs: KernelInputs, up: Upstream, of_rows: RowGradients, of_keys: KeyGradients, firsts: bounds.Firsts | None
) -> dict[str, Tensor]:
    """Those of the bias that are learned."""
    terms = inputs.terms
    tensors: dict[str, Any] = {}
    if terms.tables and any(table.table.requires_grad for _, table in terms.tables):
        if inputs.offsets[0]:
            tensors |= _table_gradients(inputs, up, firsts)
        else:
            name, table = terms.tables[0]
            tensors[f"{name}.table"] = _entries(inputs, up, 0, table.table.shape[1])
    if terms.level is not None:
        name, bias = terms.level
        own: dict[str, Any] = {"query_level": of_rows.d_level, "key_level": of_keys.d_level}
        # A level's rest moves the difference as the level does; an operator's results must not be one tensor.
        own |= {"query_rest": own["query_level"].clone(), "key_rest": own["key_level"].clone()}
        own["slope"] = of_rows.d_slope
        tensors |= {f"{name}.{part}": x for part, x in own.items() if getattr(bias, part) is not None}
    if terms.line is not None:
        name, line = terms.line
        assert of_rows.d_factor is not None
        tensors[f"{name}.factor"] = of_rows.d_factor.sum(1)
        tensors[f"{name}.knots"] = torch.zeros_like(line.knots)
        for part, x in (("slope", of_rows.d_line_slope), ("intercept", of_rows.d_line_start)):
            assert x is not None
            tensors[f"{name}.{part}"] = x.sum(1).unflatten(0, inputs.shape[:2]).sum(0)
        if line.curve.table.requires_grad:
            tensors[f"{name}.curve.table"] = _entries(inputs, up, 1, line.curve.table.shape[1])
    if terms.profile is not None:
        name, profile = terms.profile
        mixes = of_rows.d_mixes if profile.side == "query" else of_keys.d_mixes
        assert mixes is not None
        tensors[f"{name}.rows"] = mixes
        if profile.profiles.requires_grad:
            tensors[f"{name}.profiles"] = _entries(inputs, up, 2, profile.profiles.shape[2])
    return tensors


def _entries(inputs: KernelInputs, up: Upstream, which: int, length: int) -> Float[Tensor, "head *profile entry"]:
    """The gradient of a table, a curve or profiles, for every head."""
    call = inputs.call
    profiles = (inputs.flags.PROFILES,) if which == 2 else ()
    tile = inputs.tile("entries")
    chunks = _chunks(inputs, triton.cdiv(call.queries, tile.rows), math.prod(profiles) * length)
    sums = call.q.new_zeros(chunks * call.batch, call.heads, *profiles, length, dtype=torch.float32)
    if call.q.numel() and call.keys:
        given, sizes, flags = inputs.arguments(tile, None)
        grid = chunks, call.heads, call.batch
        entries_kernel[grid](given, sizes, up, sums, length, F=flags, WHICH=which, **_options(tile))
    # Curves and profiles have factors in units of log 2.
    return sums.sum(0) if which == 0 else sums.sum(0) / LOG2E


def _chunks(inputs: KernelInputs, blocks: int, entries: int) -> int:
    """Over how many programs the blocks of rows of a sequence and head are spread.

    Each has its own sums of all entries. So many that together they take no more memory than the queries in float32,
    unless those of a single one do.
    """
    return max(1, min(blocks, inputs.call.queries * inputs.flags.DIM // max(entries, 1)))


def _table_gradients(inputs: KernelInputs, up: Upstream, firsts: bounds.Firsts | None) -> dict[str, Tensor]:
    """Those of tables that follow the slots."""
    call, start = inputs.call, int(inputs.call.layout.start)
    tile = inputs.tile("bands")
    size = tile.rows
    row_blocks, key_blocks = triton.cdiv(call.queries, size), triton.cdiv(call.keys, size)
    lowest = 1 - key_blocks
    if call.visibility.is_causal:
        lowest = max(lowest, -((start + size - 1) // size))
    count = max(row_blocks - lowest, 0)
    sums = call.q.new_zeros(call.batch, call.heads, count, 2, size, dtype=torch.float32)
    if sums.numel() and call.keys:
        given, sizes, flags = inputs.arguments(tile, firsts)
        grid = count, call.heads, call.batch
        bands_kernel[grid](given, sizes, up, sums, lowest, F=flags, **_options(tile))
    # From row - column = (lowest - 1) size on.
    near, before = (x.flatten(2) for x in sums.unbind(3))
    d_strip = F.pad(before, (0, size)) + F.pad(near, (size, 0))
    first = (lowest - 1) * size + start
    return {
        f"{name}.table": _of_table(table, d_strip, [first + offset - table.first for offset in own])
        for (name, table), own in zip(inputs.terms.tables, inputs.offsets, strict=True)
    }


def _of_table(bias: DistanceBias, d_strip: Float[Tensor, "batch head entry"], firsts: list[int]) -> Tensor:
    """The gradient of a table from sums by distance, whose first entry is the table's `first` one before clamping."""
    length, count = bias.table.shape[1], d_strip.shape[2]
    parts = [d_strip.sum(0)] if len(firsts) == 1 else list(d_strip)
    total = torch.zeros_like(parts[0][:, :1]).expand(-1, length)
    for first, part in zip(firsts, parts, strict=True):
        below, beyond = min(max(-first, 0), count), min(max(length - first, 0), count)
        middle = part[:, below:beyond]
        begin = max(first, 0)
        total = total + F.pad(middle, (begin, length - begin - middle.shape[1])) if middle.shape[1] else total
        ends = [part[:, :below].sum(1, keepdim=True), part[:, max(beyond, below) :].sum(1, keepdim=True)]
        total = total + F.pad(ends[0], (0, length - 1)) + F.pad(ends[1], (length - 1, 0))
    return total


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}
