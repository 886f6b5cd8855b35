"""One call as its kernels read it: tensors, sizes and flags."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton import bounds
from lengthwise.attention.triton.bounds import LOG2E
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
)
from lengthwise.attention.triton.masks import block_ranges, mask_tensors, seen_spans
from lengthwise.attention.triton.terms import Terms, noted_offsets, terms_of
from lengthwise.attention.triton.tiles import Load, Tile, capability_of, is_interpreted, tile_for
from lengthwise.bias import DistanceBias, LevelBias, LineBias, QueryDistanceBias, two_floats

ENTRIES = 16
CURVES = {"linear": LINEAR, "log1p_square": LOGARITHMIC}
SIDES = {"query": OF_QUERIES, "key": OF_KEYS}
AXES = ((0, "batch"), (1, "head"), (2, "row"))


class KernelInputs:
    """One call as its kernels read it."""

    def __init__(self, call: AttentionCall, notes: Mapping[str, int]) -> None:
        terms = terms_of(call.bias)
        assert isinstance(terms, Terms)
        self.call, self.terms = call, terms
        self.shape = call.batch, call.heads, call.queries
        self.offsets = [noted_offsets(notes, n) for n in range(len(terms.tables))]
        self.shortest = notes.get("shortest")
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        hidden, tensors, sizes = mask_tensors(call), self._tensors(), self._sizes()
        self.given: dict[str, Any] = dict.fromkeys(Given._fields) | hidden | tensors | {"q": q, "k": k, "v": v}
        strides = {f"{name}_{axis}": x.stride(n) for name, x in zip("qkv", (q, k, v), strict=True) for n, axis in AXES}
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
            FINE=terms.level is not None and call.dtype == torch.float32,
            LINE=terms.line is not None,
            PROFILE=0 if terms.profile is None else SIDES[terms.profile[1].side].value,
            ZERO=terms.profile is not None and terms.profile[1].beyond == "zero",
            LOGIT=call.logit_scale is not None,
            CAP=capped,
            SINK=call.sink is not None,
            DOCUMENTS="query_documents" in hidden,
            PADDING="key_mask" in hidden,
            BANDS=len(call.visibility.bands),
            RANGES=len(hidden) > 1,
            DIM=call.q.shape[3],
            VALUE=call.v.shape[3],
            D=power_of_2(call.q.shape[3]),
            DV=power_of_2(call.v.shape[3]),
            LINES=0 if terms.line is None else terms.line[1].slope.shape[1],
            PROFILES=0 if terms.profile is None else terms.profile[1].rows.shape[3],
            BM=0,
            BN=0,
            BE=ENTRIES,
            TARGET=(INTERPRETED if is_interpreted() else OTHER if torch.version.hip else NVIDIA).value,
            WIDE=_reach(call, q, k, v) >= 2**31,
            SKIP=False,
        )
        self.spans = seen_spans(call) if self.flags.RANGES else None

    def tile(self, kernel: str) -> Tile:
        """The tile of a kernel, by its name."""
        width = max(self.flags.D, self.flags.DV)
        return tile_for(kernel, self.call.dtype, width, self._load(kernel), capability_of(self.call.q.device))

    def _load(self, kernel: str) -> Load:
        terms = self.terms
        if kernel == "keys" and terms.profile is not None and terms.profile[1].side == "key":
            return Load.SUMMED
        if terms.line is not None or terms.profile is not None:
            return Load.HEAVY
        if self.flags.RANGES and (terms.tables or terms.level is not None):
            return Load.MASKED
        if terms.level is not None and (terms.tables or terms.level[1].curve != "linear"):
            return Load.CROWDED
        return Load.GATHERED if terms.tables and not self.offsets[0] else Load.LIGHT

    def arguments(self, tile: Tile, firsts: bounds.Firsts | None) -> tuple[Given, Sizes, Flags]:
        """What every kernel is given: tensors, sizes and flags."""
        ranges = None
        if self.spans is not None:
            ranges = block_ranges(self.spans, self.call.keys, tile.rows).expand(self.call.batch, -1, -1).contiguous()
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
                tensors[name] = spread(extra, *self.shape)
        if terms.tables and self.offsets[0]:
            strips = [self._strip(table, own) for (_, table), own in zip(terms.tables, self.offsets, strict=True)]
            tensors["table"] = (sum(strips[1:], strips[0]) * LOG2E).contiguous()
        elif terms.tables:
            table = terms.tables[0][1]
            tensors["table"] = spread(table.table, call.heads, -1) * LOG2E
            tensors |= self._positions("table", table)
        if terms.level is not None:
            tensors |= self._level(terms.level[1].summed())
        if terms.line is not None:
            tensors |= self._line(terms.line[1])
        if terms.profile is not None:
            profile = terms.profile[1]
            tensors["mixes"] = spread(profile.rows, call.batch, call.heads, -1, -1) * LOG2E
            tensors["profiles"] = spread(profile.profiles, call.heads, -1, -1)
            tensors |= self._positions("profile", profile)
        return tensors

    def _positions(self, name: str, bias: DistanceBias | QueryDistanceBias) -> dict[str, Tensor]:
        sides = {f"{name}_query": bias.query, f"{name}_key": bias.key}
        return {side: x.expand(self.call.batch, -1).int().contiguous() for side, x in sides.items()}

    def _strip(self, bias: DistanceBias, offsets: list[int]) -> Float[Tensor, "#batch head entry"]:
        """The entry that row - column has in the table, from 1 - keys on, with room at both ends."""
        call, table = self.call, spread(bias.table, self.call.heads, -1)
        apart = torch.arange(_strip_length(call), device=table.device)
        apart = apart - (ROOM.value + call.keys - 1) + int(call.layout.start) - bias.first
        return torch.stack([table[:, (apart + offset).clamp(0, table.shape[1] - 1)] for offset in offsets])

    def _level(self, bias: LevelBias) -> dict[str, Tensor]:
        tensors = {}
        for side, count in (("query", self.call.queries), ("key", self.call.keys)):
            level, rest = getattr(bias, f"{side}_level"), getattr(bias, f"{side}_rest")
            high, low = two_floats(level.detach()) if rest is None else (level, rest)
            tensors[f"{side}_level"] = spread(high, *self.shape[:2], count)
            tensors[f"{side}_rest"] = spread(low, *self.shape[:2], count)
        tensors["slope"] = spread(bias.slope, *self.shape) * LOG2E
        return tensors

    def _line(self, bias: LineBias) -> dict[str, Tensor]:
        heads = self.call.heads
        tensors = {
            "curve": spread(bias.curve.table, 1, -1),
            "factor": spread(bias.factor, self.call.batch, -1),
            "knots": spread(bias.knots, -1),
            "line_slope": spread(bias.slope, heads, -1) * LOG2E,
            "line_start": spread(bias.intercept, heads, -1) * LOG2E,
        }
        return tensors | self._positions("curve", bias.curve)


def spread(x: Tensor, *shape: int) -> Tensor:
    """In float32, for every sequence, head and row, lying close."""
    return x.detach().float().expand(*shape).contiguous()


def _reach(call: AttentionCall, *tensors: Tensor) -> int:
    """How far apart the first and the last row of one sequence and head can lie, in elements."""
    rows, widths = max(call.queries, call.keys), max(call.q.shape[3], call.v.shape[3])
    return rows * max(widths, *(x.stride(2) for x in tensors))


def _strip_length(call: AttentionCall) -> int:
    """Room for every row - column and more, in whole sixteens: else it would be one more size to compile for."""
    return -(-(call.queries + call.keys) // 16) * 16 + 2 * ROOM.value


def power_of_2(width: int) -> int:
    """The next power of 2, and 16 at least."""
    return max(16, triton.next_power_of_2(width))
