"""One call as the kernel sees it: plain numbers and pointers into contiguous float32 tensors."""

import ctypes
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.distance_terms import slot_offsets
from lengthwise.attention.row_block.visible import Visible
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, StepBias, at_least_float32

COLUMNS = 128
"""The kernel reads the bias in blocks of so many keys, so the strip has as much room behind."""

COUNTS = [
    "batch",
    "heads",
    "group",
    "queries",
    "keys",
    "dim",
    "value",
    "start",
    "kind",
    "learned",
    "skip",
    "threads",
    "strip_batches",
    "strip_heads",
    "level_batches",
    "level_heads",
    "slope_batches",
    "slope_heads",
    "slope_queries",
    "factor_batches",
    "knot_count",
]
ARRAYS = [
    "q",
    "k",
    "v",
    "low",
    "high",
    "strip",
    "query_level",
    "key_level",
    "slope",
    "factor",
    "knots",
    "line_slope",
    "line_start",
    "out",
    "lse",
    "d_out",
    "d_q",
    "d_k",
    "d_v",
    "d_strip",
    "d_slope",
    "d_query_level",
    "d_key_level",
    "d_factor",
    "d_line_slope",
    "d_line_start",
    "visited",
]
KINDS = {type(None): 0, DistanceBias: 1, LevelBias: 2, StepBias: 2, LineBias: 3}
LINES = 256
"""The kernel has room for so many lines."""


class Record(ctypes.Structure):
    """kernel.cpp's Problem, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in COUNTS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ARRAYS),
    ]


@dataclass
class Problem:
    """The tensors are held here for as long as the kernel may read them."""

    counts: dict[str, int]
    scale: float
    arrays: dict[str, Tensor] = field(default_factory=dict)

    def record(self) -> Record:
        """What is handed over; a missing array is a null pointer."""
        pointers = {name: tensor.data_ptr() for name, tensor in self.arrays.items()}
        return Record(**self.counts, scale=self.scale, **pointers)


def make_problem(call: Call, q: Tensor, k: Tensor, v: Tensor, *, learned: bool, skip: bool) -> Problem:
    """The call with q, k and v as float32 whose dims are multiples of 16."""
    low, high = intervals(call)
    counts = dict.fromkeys(COUNTS, 0) | {
        "batch": call.batch,
        "heads": call.heads,
        "group": call.group,
        "queries": call.queries,
        "keys": call.keys,
        "dim": q.shape[3],
        "value": v.shape[3],
        "start": int(call.start),
        "kind": KINDS[type(call.bias)],
        "learned": int(learned),
        "skip": int(skip and call.causal and not isinstance(call.bias, LineBias)),
        "threads": torch.get_num_threads(),
    }
    problem = Problem(counts, call.scale, {"q": q, "k": k, "v": v, "low": low, "high": high})
    if (table := by_distance(call.bias)) is not None:
        columns = strip_columns(call, table)
        strip = at_least_float32(table.table).float()[:, columns].transpose(0, 1).contiguous()
        problem.arrays["strip"] = strip
        problem.counts |= {"strip_batches": strip.shape[0], "strip_heads": strip.shape[1]}
    if isinstance(call.bias, LineBias):
        lines = {"factor": call.bias.factor, "knots": call.bias.knots}
        lines |= {"line_slope": call.bias.slope, "line_start": call.bias.intercept}
        problem.arrays |= {name: x.float().contiguous() for name, x in lines.items()}
        problem.counts |= {"factor_batches": call.bias.factor.shape[0], "knot_count": call.bias.knots.shape[0]}
    elif isinstance(call.bias, LevelBias):
        shape = torch.broadcast_shapes(call.bias.query_level.shape[:2], call.bias.key_level.shape[:2])
        for name in ("query_level", "key_level"):
            level = getattr(call.bias, name).double()
            problem.arrays[name] = level.expand(*shape, -1).contiguous()
        slope = call.bias.slope.float().contiguous()
        problem.arrays["slope"] = slope
        problem.counts |= {"level_batches": shape[0], "level_heads": shape[1]}
        problem.counts |= dict(zip(("slope_batches", "slope_heads", "slope_queries"), slope.shape, strict=True))
    return problem


def by_distance(bias: Bias | None) -> DistanceBias | None:
    """The part of a bias that is one number per distance, if it has one."""
    return bias.curve if isinstance(bias, LineBias) else bias if isinstance(bias, DistanceBias) else None


def strip_columns(call: Call, bias: DistanceBias) -> Int[Tensor, "batch column"]:
    """Which column of the table a key `x - queries + 1` slots after its query has, for every x."""
    offsets = slot_offsets(bias, Visible(call))
    assert offsets is not None
    after = torch.arange(call.queries + call.keys + COLUMNS) - (call.queries - 1)
    distance = torch.tensor(offsets)[:, None] + int(call.start) - after - bias.first
    return distance.clamp(0, bias.table.shape[1] - 1)


def intervals(call: Call) -> tuple[Int[Tensor, "batch query"], Int[Tensor, "batch query"]]:
    """The keys that each query may see, from `low` up to `high`; there are no `holes` between."""
    slots = int(call.start) + torch.arange(call.queries)
    low = torch.zeros(call.batch, call.queries, dtype=torch.int64)
    high = torch.full_like(low, call.keys)
    if call.causal:
        high = torch.minimum(high, slots + 1)
    if call.window is not None:
        low = torch.maximum(low, slots - call.window + 1)
        high = torch.minimum(high, slots + call.window)
    if call.key_mask is not None:
        first, last = _ends(call.key_mask)
        low, high = torch.maximum(low, first[:, None]), torch.minimum(high, last[:, None])
    if call.documents is not None:
        begins, ends = _runs(call.documents)
        low, high = torch.maximum(low, begins[:, slots]), torch.minimum(high, ends[:, slots])
    return low.int().contiguous(), high.int().contiguous()


def holes(call: Call) -> bool:
    """Whether padding or documents are in more than one piece, so that a query's keys are not an interval."""
    if call.key_mask is not None:
        first, last = _ends(call.key_mask)
        if bool((call.key_mask.sum(1) != last - first).any()):
            return True
    if call.documents is not None:
        pieces = (call.documents[:, 1:] != call.documents[:, :-1]).sum(1) + 1
        kinds = torch.tensor([len(row.unique()) for row in call.documents])
        return bool((pieces != kinds).any())
    return False


def _ends(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The first True and one past the last; both 0 where there is none."""
    keys, some = mask.shape[1], mask.any(1)
    first = mask.int().argmax(1)
    last = keys - mask.flip(1).int().argmax(1)
    return first.where(some, 0), last.where(some, 0)


def _runs(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run of equal numbers around each key begins, and one past its end."""
    keys = documents.shape[1]
    slots = torch.arange(keys)
    border = torch.ones(documents.shape[0], keys + 1, dtype=torch.bool)
    border[:, 1:-1] = documents[:, 1:] != documents[:, :-1]
    begins = slots.where(border[:, :-1], 0).cummax(1).values
    ends = (slots + 1).where(border[:, 1:], keys).flip(1).cummin(1).values.flip(1)
    return begins, ends


def padded(x: Float[Tensor, "batch head position dim"]) -> Float[Tensor, "batch head position wider"]:
    """float32 with zeros up to a multiple of 16 channels, which is what the kernel's registers hold."""
    missing = -x.shape[3] % 16
    x = torch.nn.functional.pad(x.float(), (0, missing)) if missing else x.float()
    return x.contiguous()
