"""What runs inside the operators: the tensors that kernels read, and the launches, forward and backward.

Nothing here reads a value back from the device, and nothing is of torch's operations whose result depends on the order
in which threads come: sums are reductions, and what is read by index is never written by index.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lengthwise.attention.backend import merge
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton import bounds
from lengthwise.attention.triton.kernels import (
    bands_kernel,
    drop_kernel,
    entries_kernel,
    forward_kernel,
    keys_kernel,
    rows_kernel,
)
from lengthwise.attention.triton.kernels.arguments import (
    GATHERED,
    INTERPRETED,
    LINEAR,
    LOGARITHMIC,
    NVIDIA,
    OF_KEYS,
    OF_QUERIES,
    OTHER,
    ROOM,
    STRIP,
    Flags,
    Given,
    Sizes,
    Upstream,
)
from lengthwise.attention.triton.kernels.backward import KeyGradients, RowGradients
from lengthwise.attention.triton.terms import Terms, can_skip, noted_offsets, terms_of
from lengthwise.attention.triton.tiles import (
    BOUNDED_KEYS,
    BOUNDED_ROWS,
    Tile,
    is_interpreted,
    shares_of_keys,
    tile_for,
)
from lengthwise.bias import DistanceBias, LevelBias, LineBias, QueryDistanceBias, two_floats

LOG2E = 1.4426950408889634
FEW_ROWS = 16
"""Up to so many queries are decoding: the keys are spread over the card."""
FAR = 2**30
"""Further than any token is from another."""
ENTRIES = 16
RANGES_AT_ONCE = 128
CURVES = {"linear": LINEAR, "log1p_square": LOGARITHMIC}
SIDES = {"query": OF_QUERIES, "key": OF_KEYS}


def forward(call: AttentionCall, notes: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp in float32, of keys and values that are finite where they are hidden."""
    return _Launch(call, notes).forward()


def backward(
    call: AttentionCall, notes: Mapping[str, int], d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """The gradients of q, k and v and of what else is learned, by name."""
    return _Launch(call, notes).backward(d_out, d_lse, out, lse)


def skipped_share(call: AttentionCall, notes: Mapping[str, int]) -> float:
    """How much of the forward work that causality leaves is skipped, 0 to 1; reads values back."""
    return bounds.share_skipped(call, _Launch(call, notes).first_keys())


class _Launch:
    """One call as its kernels read it."""

    def __init__(self, call: AttentionCall, notes: Mapping[str, int]) -> None:
        terms = terms_of(call.bias)
        assert isinstance(terms, Terms)
        self.call, self.terms = call, terms
        self.shape = call.batch, call.heads, call.queries
        self.offsets = [noted_offsets(notes, n) for n in range(len(terms.tables))]
        self.shortest = notes.get("shortest")
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        masks, tensors, sizes = _masks(call), self._tensors(), self._sizes()
        self.given: dict[str, Any] = dict.fromkeys(Given._fields) | masks | tensors | {"q": q, "k": k, "v": v}
        strides = {f"{name}_{axis}": x.stride(n) for name, x in zip("qkv", (q, k, v), strict=True) for n, axis in _AXES}
        capped = call.softcap is not None
        self.sizes: dict[str, Any] = (
            sizes
            | strides
            | {
                "batch": call.batch,
                "heads": call.heads,
                "group": call.group,
                "queries": call.queries,
                "keys": call.keys,
                "scale": call.scale / call.softcap if call.softcap is not None else call.scale * LOG2E,
                "cap": call.softcap * LOG2E if call.softcap is not None else 0.0,
                "plain_scale": call.scale,
            }
        )
        self.flags = Flags(
            TABLE=0 if not terms.tables else STRIP.value if self.offsets[0] else GATHERED.value,
            LEVEL=0 if terms.level is None else CURVES[terms.level[1].curve].value,
            LINE=terms.line is not None,
            PROFILE=0 if terms.profile is None else SIDES[terms.profile[1].side].value,
            ZERO=terms.profile is not None and terms.profile[1].beyond == "zero",
            LOGIT=call.logit_scale is not None,
            CAP=capped,
            SINK=call.sink is not None,
            DOCUMENTS="query_documents" in masks,
            PADDING="key_mask" in masks,
            BANDS=len(call.visibility.bands),
            RANGES=len(masks) > 1,
            DIM=call.q.shape[3],
            VALUE=call.v.shape[3],
            D=_power_of_2(call.q.shape[3]),
            DV=_power_of_2(call.v.shape[3]),
            LINES=0 if terms.line is None else terms.line[1].slope.shape[1],
            PROFILES=0 if terms.profile is None else terms.profile[1].rows.shape[3],
            BM=0,
            BN=0,
            BE=ENTRIES,
            TARGET=(INTERPRETED if is_interpreted() else OTHER if torch.version.hip else NVIDIA).value,
            WIDE=_reach(call, q, k, v) >= 2**31,
            SKIP=False,
        )
        self.spans = _spans(call) if self.flags.RANGES else None

    def first_keys(self, up: Upstream | None = None) -> bounds.Firsts | None:
        """The first key that every block of rows has to visit; None if nothing can be skipped."""
        follows_slots = all(self.offsets)
        if not can_skip(self.call, self.terms, follows_slots=follows_slots, shortest=self.shortest):
            return None
        arguments = self._arguments(Tile(BOUNDED_ROWS, BOUNDED_KEYS, 2, 1), None)
        return bounds.first_keys(self.call, self.flags, self.given, arguments, up)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp."""
        call = self.call
        few = call.queries <= FEW_ROWS
        tile = self._tile("decode" if few else "forward")
        shares = 1
        blocks = triton.cdiv(call.queries, tile.rows)
        if few:
            shares = shares_of_keys(call.batch * call.heads * blocks, triton.cdiv(call.keys, tile.keys), call.q.device)
        out = call.q.new_zeros(shares, *self.shape, call.v.shape[3], dtype=torch.float32)
        lse = call.q.new_full((shares, *self.shape), -math.inf, dtype=torch.float32)
        if call.q.numel() and call.keys:
            given, sizes, flags = self._arguments(tile, None if few else self.first_keys())
            grid = blocks if shares == 1 else shares, call.heads, call.batch
            forward_kernel[grid](given, sizes, out, lse, F=flags, SHARED=shares > 1, **_options(tile))
        elif call.sink is not None:
            lse = self.given["sink"][None].clone()
        return (out[0], lse[0]) if shares == 1 else merge(*zip(out, lse, strict=True))

    def backward(self, d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """The gradients by name."""
        call, queries, keys = self.call, self.call.queries, self.call.keys
        up = self._upstream(d_out, d_lse, out, lse)
        tile = self._tile("rows")
        blocks = triton.cdiv(queries, tile.rows)
        to_rows, to_keys = self._row_gradients(blocks), self._key_gradients()
        firsts = None
        if call.q.numel() and keys:
            firsts = self.first_keys(up)
            profiles = _power_of_2(max(self.flags.PROFILES, 1))
            given, sizes, flags = self._arguments(tile, firsts)
            power = _power_of_2(max(self.flags.LINES, 1))
            extra = {"F": flags, "LINES": power, "PROFILES": profiles}
            rows_kernel[blocks, call.heads, call.batch](given, sizes, up, to_rows, **extra, **_options(tile))
            tile = self._tile("keys")
            given, sizes, flags = self._arguments(tile, firsts)
            extra = {"F": flags, "PROFILES": profiles, "AT_ONCE": RANGES_AT_ONCE}
            grid = triton.cdiv(keys, tile.keys), call.k.shape[1], call.batch
            keys_kernel[grid](given, sizes, up, to_keys, **extra, **_options(tile))
        gradients: dict[str, Any] = {"q": to_rows.d_q, "k": to_keys.d_k, "v": to_keys.d_v}
        if call.logit_scale is not None:
            gradients["logit_scale"] = to_rows.d_logit
        if call.sink is not None:
            gradients["sink"] = -(self.given["sink"] * LOG2E - up.lse).exp2() * up.drop
        gradients |= self._term_gradients(up, to_rows, to_keys, firsts)
        tensors = call.tensors()
        return {name: x.sum_to_size(tensors[name].shape).to(tensors[name].dtype) for name, x in gradients.items()}

    def _upstream(self, d_out: Tensor, d_lse: Tensor, out: Tensor, lse: Tensor) -> Upstream:
        call, empty = self.call, lse == -math.inf
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
            tile = self._tile("rows")
            given, sizes, flags = self._arguments(tile, self.first_keys())
            grid = triton.cdiv(call.queries, tile.rows), call.heads, call.batch
            drop_kernel[grid](given, sizes, up, drop, F=flags, **_options(tile))
        else:
            drop = up.drop
        return up._replace(drop=drop)

    def _tile(self, kernel: str) -> Tile:
        width = max(self.flags.D, self.flags.DV)
        device = self.call.q.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        heavy = bool(self.flags.LINE or self.flags.PROFILE)
        return tile_for(kernel, self.call.dtype, width, heavy, capability)

    def _arguments(self, tile: Tile, firsts: bounds.Firsts | None) -> tuple[Given, Sizes, Flags]:
        ranges = None
        if self.spans is not None:
            ranges = _ranges(self.spans, self.call.keys, tile.rows).expand(self.call.batch, -1, -1).contiguous()
        blocks = triton.cdiv(self.call.queries, tile.rows)
        first = None if firsts is None else bounds.by_tile(firsts, tile.rows, blocks)
        flags = self.flags._replace(BM=tile.rows, BN=tile.keys, SKIP=first is not None)
        given = Given(**(self.given | {"ranges": ranges, "first": first}))
        return given, Sizes(**self.sizes), Flags(*map(tl.constexpr, flags))

    def _sizes(self) -> dict[str, int]:
        names = ("table", "curve", "profile")
        sizes = dict.fromkeys((*(f"{name}_{end}" for name in names for end in ("length", "first")),), 1)
        sizes |= {"strip_batch": 0, "strip_length": 0}
        parts: dict[str, tuple[Tensor, int]] = {}
        if self.terms.tables and not self.offsets[0]:
            parts["table"] = self.terms.tables[0][1].table, self.terms.tables[0][1].first
        if self.terms.line is not None:
            parts["curve"] = self.terms.line[1].curve.table, self.terms.line[1].curve.first
        if self.terms.profile is not None:
            parts["profile"] = self.terms.profile[1].profiles, self.terms.profile[1].first
        for name, (table, first) in parts.items():
            sizes |= {f"{name}_length": table.shape[-1], f"{name}_first": first}
        if self.terms.tables and self.offsets[0]:
            sizes["strip_length"] = _strip_length(self.call)
            several = max(map(len, self.offsets)) > 1
            sizes["strip_batch"] = sizes["strip_length"] * self.call.heads if several else 0
        return sizes

    def _tensors(self) -> dict[str, Tensor]:
        call, terms = self.call, self.terms
        tensors: dict[str, Tensor] = {}
        for name in ("logit_scale", "sink"):
            if (extra := getattr(call, name)) is not None:
                tensors[name] = _spread(extra, *self.shape)
        if terms.tables and self.offsets[0]:
            strips = [self._strip(table, own) for (_, table), own in zip(terms.tables, self.offsets, strict=True)]
            tensors["table"] = (sum(strips[1:], strips[0]) * LOG2E).contiguous()
        elif terms.tables:
            table = terms.tables[0][1]
            tensors["table"] = _spread(table.table, call.heads, -1) * LOG2E
            tensors |= self._positions("table", table)
        if terms.level is not None:
            tensors |= self._level(terms.level[1].summed())
        if terms.line is not None:
            tensors |= self._line(terms.line[1])
        if terms.profile is not None:
            profile = terms.profile[1]
            tensors["mixes"] = _spread(profile.rows, call.batch, call.heads, -1, -1) * LOG2E
            tensors["profiles"] = _spread(profile.profiles, call.heads, -1, -1)
            tensors |= self._positions("profile", profile)
        return tensors

    def _positions(self, name: str, bias: DistanceBias | QueryDistanceBias) -> dict[str, Tensor]:
        sides = {f"{name}_query": bias.query, f"{name}_key": bias.key}
        return {side: x.expand(self.call.batch, -1).int().contiguous() for side, x in sides.items()}

    def _strip(self, bias: DistanceBias, offsets: list[int]) -> Float[Tensor, "#batch head entry"]:
        """The entry that row - column has in the table, from 1 - keys on, with room at both ends."""
        call, table = self.call, _spread(bias.table, self.call.heads, -1)
        apart = torch.arange(_strip_length(call), device=table.device)
        apart = apart - (ROOM.value + call.keys - 1) + int(call.layout.start) - bias.first
        return torch.stack([table[:, (apart + offset).clamp(0, table.shape[1] - 1)] for offset in offsets])

    def _level(self, bias: LevelBias) -> dict[str, Tensor]:
        tensors = {}
        for side, count in (("query", self.call.queries), ("key", self.call.keys)):
            level, rest = getattr(bias, f"{side}_level"), getattr(bias, f"{side}_rest")
            high, low = two_floats(level.detach()) if rest is None else (level, rest)
            tensors[f"{side}_level"] = _spread(high, *self.shape[:2], count)
            tensors[f"{side}_rest"] = _spread(low, *self.shape[:2], count)
        tensors["slope"] = _spread(bias.slope, *self.shape) * LOG2E
        return tensors

    def _line(self, bias: LineBias) -> dict[str, Tensor]:
        heads = self.call.heads
        tensors = {
            "curve": _spread(bias.curve.table, 1, -1),
            "factor": _spread(bias.factor, self.call.batch, -1),
            "knots": _spread(bias.knots, -1),
            "line_slope": _spread(bias.slope, heads, -1) * LOG2E,
            "line_start": _spread(bias.intercept, heads, -1) * LOG2E,
        }
        return tensors | self._positions("curve", bias.curve)

    def _row_gradients(self, blocks: int) -> RowGradients:
        call, flags = self.call, self.flags
        wanted = {"d_logit": flags.LOGIT, "d_slope": flags.LEVEL, "d_level": flags.LEVEL, "d_factor": flags.LINE}
        tensors: dict[str, Any] = dict.fromkeys(RowGradients._fields)
        tensors |= {name: call.q.new_zeros(self.shape, dtype=torch.float32) for name, is_on in wanted.items() if is_on}
        if flags.LINE:
            shape = (call.batch * call.heads, blocks, flags.LINES)
            tensors |= {name: call.q.new_zeros(shape, dtype=torch.float32) for name in ("d_line_slope", "d_line_start")}
        if self.terms.profile is not None and self.terms.profile[1].side == "query":
            tensors["d_mixes"] = call.q.new_zeros(*self.shape, flags.PROFILES, dtype=torch.float32)
        tensors["d_q"] = call.q.new_zeros(call.q.shape)
        return RowGradients(**tensors)

    def _key_gradients(self) -> KeyGradients:
        call, flags = self.call, self.flags
        shape = (call.batch, call.heads, call.keys)
        tensors: dict[str, Any] = dict.fromkeys(KeyGradients._fields)
        tensors |= {"d_k": call.k.new_zeros(call.k.shape), "d_v": call.v.new_zeros(call.v.shape)}
        if flags.LEVEL:
            tensors["d_level"] = call.q.new_zeros(shape, dtype=torch.float32)
        if self.terms.profile is not None and self.terms.profile[1].side == "key":
            tensors["d_mixes"] = call.q.new_zeros(*shape, flags.PROFILES, dtype=torch.float32)
        return KeyGradients(**tensors)

    def _term_gradients(
        self, up: Upstream, of_rows: RowGradients, of_keys: KeyGradients, firsts: bounds.Firsts | None
    ) -> dict[str, Tensor]:
        """Those of the bias that are learned."""
        terms = self.terms
        tensors: dict[str, Any] = {}
        if terms.tables and any(table.table.requires_grad for _, table in terms.tables):
            if self.offsets[0]:
                tensors |= self._table_gradients(up, firsts)
            else:
                name, table = terms.tables[0]
                tensors[f"{name}.table"] = self._entries(up, 0, table.table.shape[1]).sum(0)
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
                tensors[f"{name}.{part}"] = x.sum(1).unflatten(0, self.shape[:2]).sum(0)
            if line.curve.table.requires_grad:
                tensors[f"{name}.curve.table"] = self._entries(up, 1, line.curve.table.shape[1]).sum(0)
        if terms.profile is not None:
            name, profile = terms.profile
            mixes = of_rows.d_mixes if profile.side == "query" else of_keys.d_mixes
            assert mixes is not None
            tensors[f"{name}.rows"] = mixes
            if profile.profiles.requires_grad:
                tensors[f"{name}.profiles"] = self._entries(up, 2, profile.profiles.shape[2]).sum(0)
        return tensors

    def _entries(self, up: Upstream, which: int, length: int) -> Float[Tensor, "batch head *profile entry"]:
        """The gradient of a table, a curve or profiles, for every sequence and head."""
        call = self.call
        profiles = (self.flags.PROFILES,) if which == 2 else ()
        sums = call.q.new_zeros(call.batch, call.heads, *profiles, length, dtype=torch.float32)
        if call.q.numel() and call.keys:
            tile = self._tile("entries")
            given, sizes, flags = self._arguments(tile, None)
            extra = {"F": flags, "WHICH": which, "PROFILES": _power_of_2(*profiles) if which == 2 else 1}
            grid = triton.cdiv(length, ENTRIES), call.heads, call.batch
            entries_kernel[grid](given, sizes, up, sums, length, **extra, **_options(tile))
        return sums

    def _table_gradients(self, up: Upstream, firsts: bounds.Firsts | None) -> dict[str, Tensor]:
        """Those of tables that follow the slots."""
        call, start = self.call, int(self.call.layout.start)
        tile = self._tile("bands")
        size = tile.rows
        row_blocks, key_blocks = triton.cdiv(call.queries, size), triton.cdiv(call.keys, size)
        lowest = 1 - key_blocks
        if call.visibility.is_causal:
            lowest = max(lowest, -((start + size - 1) // size))
        count = max(row_blocks - lowest, 0)
        sums = call.q.new_zeros(call.batch, call.heads, count, 2, size, dtype=torch.float32)
        if sums.numel() and call.keys:
            given, sizes, flags = self._arguments(tile, firsts)
            grid = count, call.heads, call.batch
            bands_kernel[grid](given, sizes, up, sums, lowest, F=flags, **_options(tile))
        # From row - column = (lowest - 1) size on.
        near, before = (x.flatten(2) for x in sums.unbind(3))
        d_strip = F.pad(before, (0, size)) + F.pad(near, (size, 0))
        first = (lowest - 1) * size + start
        return {
            f"{name}.table": _of_table(table, d_strip, [first + offset - table.first for offset in own])
            for (name, table), own in zip(self.terms.tables, self.offsets, strict=True)
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


_AXES = ((0, "batch"), (1, "head"), (2, "row"))

Spans = tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch query"], Bool[Tensor, "#batch query"]]


def _spans(call: AttentionCall) -> Spans:
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


def _ranges(spans: Spans, keys: int, rows: int) -> Int[Tensor, "#batch block 4"]:
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


def _masks(call: AttentionCall) -> dict[str, Tensor]:
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
            parts["band_high"].append(own - band.nearest)
            parts["band_key"].append(other if band.first is None else other.where(key < band.first, FAR))
        tensors |= {name: torch.stack(x).clamp(-FAR, FAR).int().contiguous() for name, x in parts.items()}
    return tensors


def _spread(x: Tensor, *shape: int) -> Tensor:
    """In float32, for every sequence, head and row, lying close."""
    return x.detach().float().expand(*shape).contiguous()


def _reach(call: AttentionCall, *tensors: Tensor) -> int:
    """How far apart the first and the last row of one sequence and head can lie, in elements."""
    rows, widths = max(call.queries, call.keys), max(call.q.shape[3], call.v.shape[3])
    return rows * max(widths, *(x.stride(2) for x in tensors))


def _strip_length(call: AttentionCall) -> int:
    """Room for every row - column and more, in whole sixteens: else it would be one more size to compile for."""
    return -(-(call.queries + call.keys) // 16) * 16 + 2 * ROOM.value


def _power_of_2(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}
