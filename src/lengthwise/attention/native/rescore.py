"""Attention whose scores a small network or contextual positions make, in C++, forward and backward.

Memory is linear in length. The kernel knows biases by distance and by level. Any other bias, and every mask beyond
causality, is filled in for a chunk of rows at a time, and gets its gradient back by chunks too.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native import build
from lengthwise.attention.native.padding import padded
from lengthwise.bias import ALL, Bias, DistanceBias, LevelBias, LineBias, SumBias, at_least_float32
from lengthwise.rescore import ContextualPositions, HeadNetwork
from lengthwise.visibility import Visibility

MARGIN, COLUMNS, STRANDS = 8, 64, 16
"""As in rescore.h: room in front of the first key, keys in a block, and sums over rows that are added at the end."""

CHUNK = 2**22
"""How many numbers a chunk of a bias may have."""

LEAST_ROWS = 96
"""A chunk has at least so many rows, for every thread to have some."""

KINDS = {"none": 0, "strip": 1, "level": 2, "filled": 3}

COUNTS = (
    *("batch", "heads", "group", "queries", "keys", "dim", "value", "start", "causal", "threads", "row_from", "row_to"),
    *("hidden_channels", "input_channels", "output_channels", "kernel", "positions", "position_channels"),
    *("kind", "learned", "mask_batch", "strip_batch", "strip_head", "strip_length", "level_batch", "level_head"),
    *("key_level_batch", "key_level_head", "slope_batch", "slope_head", "rows_batch", "rows_head"),
)
ARRAYS = (
    *("q", "k", "v", "mask", "strip", "query_level", "key_level", "slope", "rows", "logit_scale", "sink"),
    *("weight_in", "bias_in", "weight_out", "bias_out", "table", "table_t", "out", "lse", "most", "total"),
    *(
        "d_out",
        "delta",
        "d_q",
        "d_k",
        "d_v",
        "d_strip",
        "d_slope",
        "d_query_level",
        "d_key_level",
        "d_rows",
        "d_logit_scale",
    ),
    *("d_network", "d_table"),
)


class Record(ctypes.Structure):
    """rescore.h's Task, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in COUNTS),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ARRAYS),
    ]


def plan(call: AttentionCall) -> "RescorePlan | Refusal":
    """The kernel takes both rescores whose structure it knows, with any bias and mask."""
    if isinstance(call.rescore, HeadNetwork | ContextualPositions):
        return RescorePlan()
    return Refusal.because(f"it has no kernel for {type(call.rescore).__name__}; row_block takes any function")


class RescorePlan(Plan):
    """The kernel of this file; what it finds out depends on numbers that only a run reads."""

    def run(self, call: AttentionCall) -> Output:
        """The output and the log-sum-exp, with gradients."""
        clean, taint = finite_inputs(call)
        problem, tensors = make_problem(clean)
        out, lse = _Rescored.apply(problem, *tensors.values())
        out = out[..., : call.v.shape[3]].to(call.dtype)
        if taint is not None:
            out, lse = out + taint[..., None].to(out.dtype), lse + taint
        return out, lse


@dataclass(frozen=True, eq=False)
class Problem:
    """What the kernel is told beside the tensors that have gradients."""

    counts: dict[str, int]
    scale: float
    softcap: float
    names: tuple[str, ...]
    """Of the tensors, in order; those of a bias that is filled in begin with "bias."."""
    bias: Bias | None
    """The bias, where it is filled in."""
    visibility: Visibility | None
    """The masks, where causality does not say it all."""

    @property
    def function(self) -> str:
        """The name of the kernel, without its direction."""
        return "lengthwise_network" if self.counts["kernel"] else "lengthwise_positions"

    def chunks(self) -> Iterator[slice]:
        """All rows, or as many at a time as may be filled in."""
        n = self.counts
        size = n["queries"]
        if self.bias is not None or self.visibility is not None:
            size = max(LEAST_ROWS, CHUNK // max(1, n["batch"] * n["heads"] * n["keys"]))
        for row in range(0, n["queries"], size):
            yield slice(row, min(row + size, n["queries"]))

    def run(
        self, direction: str, rows: slice, arrays: dict[str, Tensor], filled: Tensor | None, *, learned: bool = False
    ) -> None:
        """Call the kernel for some rows; `filled` is their bias, which is `learned` if it wants a gradient."""
        counts = self.counts | {"row_from": rows.start, "row_to": rows.stop, "threads": torch.get_num_threads()}
        counts["learned"] = int(learned)
        own = dict(arrays)
        if self.visibility is not None:
            own["mask"] = self.visibility.mask(rows)[:, 0].contiguous()
            counts["mask_batch"] = _strides(own["mask"])[0]
        if filled is not None:
            own["rows"] = filled
            counts["rows_batch"], counts["rows_head"] = _strides(filled)[:2]
        pointers = {name: tensor.data_ptr() for name, tensor in own.items()}
        record = Record(**counts, scale=self.scale, softcap=self.softcap, **pointers)
        getattr(build.library(), f"{self.function}_{direction}")(ctypes.byref(record))

    def bias_of(self, tensors: dict[str, Tensor]) -> Bias | None:
        """The bias that is filled in, of these tensors."""
        if self.bias is None:
            return None
        own = {name.removeprefix("bias."): x for name, x in tensors.items() if name.startswith("bias.")}
        return self.bias.rebuilt(own)


def make_problem(call: AttentionCall) -> tuple[Problem, dict[str, Tensor]]:
    """The call as the kernel sees it; autograd follows whatever turns its tensors into those of the kernel."""
    assert call.rescore is not None
    q, k, v = (padded(x) for x in (call.q, call.k, call.v))
    tensors = {"q": q, "k": k, "v": v}
    counts = dict.fromkeys(COUNTS, 0) | {
        "batch": call.batch,
        "heads": call.heads,
        "group": call.group,
        "queries": call.queries,
        "keys": call.keys,
        "dim": q.shape[3],
        "value": v.shape[3],
        "start": int(call.layout.start),
        "causal": int(call.visibility.is_causal),
    }
    shape = (call.batch, call.heads, call.queries)
    for name in ("logit_scale", "sink"):
        if (given := getattr(call, name)) is not None:
            tensors[name] = given.float().expand(shape).contiguous()
    made = _network(call.rescore) if isinstance(call.rescore, HeadNetwork) else _positions(call.rescore, q.shape[3])
    counts |= made[0]
    tensors |= made[1]
    kind, strides, of_bias = _bias(call)
    counts |= {"kind": KINDS[kind], **strides}
    tensors |= of_bias
    problem = Problem(
        counts=counts,
        scale=call.scale,
        softcap=call.softcap or 0.0,
        names=tuple(tensors),
        bias=call.bias if kind == "filled" else None,
        visibility=None if call.visibility.is_plain else call.visibility,
    )
    return problem, tensors


def _network(network: HeadNetwork) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The layers' weights as tap x input x output, with channels up to a multiple of 4."""
    hidden, inputs, kernel = network.weight_in.shape
    heads = inputs // 2
    channels = {"hidden_channels": hidden, "input_channels": inputs, "output_channels": heads}
    channels = {name: count + -count % 4 for name, count in channels.items()}
    wide_in, wide_hidden, wide_out = (channels[f"{name}_channels"] for name in ("input", "hidden", "output"))
    weight_in, weight_out = (w.float().permute(2, 1, 0) for w in (network.weight_in, network.weight_out))
    return {"kernel": kernel, **channels}, {
        "weight_in": F.pad(weight_in, (0, wide_hidden - hidden, 0, wide_in - inputs)).contiguous(),
        "bias_in": F.pad(network.bias_in.float(), (0, wide_hidden - hidden)),
        "weight_out": F.pad(weight_out, (0, wide_out - heads, 0, wide_hidden - hidden)).contiguous(),
        "bias_out": F.pad(network.bias_out.float(), (0, wide_out - heads)),
    }


def _positions(rescore: object, dim: int) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The table with rows and columns up to a multiple of 16."""
    assert isinstance(rescore, ContextualPositions)
    given, positions = rescore.table.shape
    table = F.pad(rescore.table.float(), (0, -positions % 16, 0, dim - given)).contiguous()
    return {"positions": positions, "position_channels": table.shape[1]}, {"table": table}


def _bias(call: AttentionCall) -> tuple[str, dict[str, int], dict[str, Tensor]]:
    """How the kernel knows the bias: its kind, strides, and tensors by name."""
    bias = call.bias
    if bias is None:
        return "none", {}, {}
    if isinstance(bias, DistanceBias) and (offsets := call.slot_offsets(bias)) is not None:
        columns = _strip_columns(call, bias, offsets)
        strip = F.embedding(columns, bias.table.float().T).transpose(1, 2).contiguous()
        batch, head, _ = _strides(strip)
        return "strip", {"strip_batch": batch, "strip_head": head, "strip_length": strip.shape[2]}, {"strip": strip}
    if isinstance(bias, LevelBias) and bias.curve == "linear" and bias.query_rest is None:
        summed = bias.summed()
        assert summed.query_level is not None
        assert summed.key_level is not None
        made = {
            "query_level": summed.query_level.double().contiguous(),
            "key_level": F.pad(summed.key_level.double(), (MARGIN, 2 * COLUMNS)).contiguous(),
            "slope": summed.slope.float().expand(-1, -1, call.queries).contiguous(),
        }
        names = {"query_level": "level", "key_level": "key_level", "slope": "slope"}
        strides: dict[str, int] = {}
        for name, x in made.items():
            batch, head, _ = _strides(x)
            strides |= {f"{names[name]}_batch": batch, f"{names[name]}_head": head}
        return "level", strides, made
    return "filled", {}, {f"bias.{name}": x for name, x in bias.tensors().items()}


def _strip_columns(call: AttentionCall, bias: DistanceBias, offsets: tuple[int, ...]) -> Int[Tensor, "batch column"]:
    """Which column of the table a key `x - MARGIN - queries + 1` slots after its query has, for every x."""
    after = torch.arange(MARGIN + call.queries + call.keys + 2 * COLUMNS) - (call.queries - 1 + MARGIN)
    # Row i is in slot start + i; offsets are positions less slots, so that a key `after` slots on counts less.
    distance = torch.tensor(offsets)[:, None] + int(call.layout.start) - after - bias.first
    return distance.clamp(0, bias.table.shape[1] - 1)


def rows_of(bias: Bias, rows: slice) -> Float[Tensor, "#batch #head row key"]:
    """Some rows of a bias, by operations whose gradients are always summed in the same order."""
    if isinstance(bias, SumBias):
        return torch.stack(torch.broadcast_tensors(*(rows_of(term, rows) for term in bias.terms))).sum(0)
    if isinstance(bias, DistanceBias):
        index = (bias.query[:, rows, None] - bias.key[:, None] - bias.first).clamp(0, bias.table.shape[1] - 1)
        return F.embedding(index, at_least_float32(bias.table).T).permute(0, 3, 1, 2)
    if isinstance(bias, LineBias):
        x = bias.factor[:, rows, None] * rows_of(bias.curve, rows)[:, 0]
        line = torch.bucketize(x.detach(), bias.knots, right=True)
        slope, intercept = (
            F.embedding(line, of_line.T).permute(0, 3, 1, 2) for of_line in (bias.slope, bias.intercept)
        )
        return slope * x[:, None] + intercept
    return bias.tile(rows, ALL)


class _Rescored(torch.autograd.Function):
    """The kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, *given: Tensor) -> tuple[Tensor, Tensor]:
        tensors = dict(zip(problem.names, given, strict=True))
        n, q = problem.counts, tensors["q"]
        out = q.new_empty(n["batch"], n["heads"], n["queries"], n["value"])
        lse, most, total = (q.new_empty(n["batch"], n["heads"], n["queries"]) for _ in range(3))
        arrays = _of_kernel(tensors) | {"out": out, "lse": lse, "most": most, "total": total}
        if out.numel():
            bias = problem.bias_of(tensors)
            for rows in problem.chunks():
                problem.run("forward", rows, arrays, None if bias is None else _filled(rows_of(bias, rows)))
        ctx.problem = problem
        ctx.save_for_backward(*given, out, lse, most, total)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        with torch.no_grad():
            found = _gradients(ctx.problem, given, d_out, d_lse, ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():
            floating = [x for x in (*given[: len(ctx.problem.names)], d_out, d_lse) if x.is_floating_point()]
            present = [x for x in found if x is not None]
            marked = iter(_FirstOnly.apply(len(present), *present, *floating))
            found = [None if x is None else next(marked) for x in found]
        return (None, *found)


class _FirstOnly(torch.autograd.Function):
    """The gradients as they are; to differentiate them again is an error, not a wrong number."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "the native backend has first derivatives only; a second derivative was asked for. "
            "Use backend='reference' for it"
        )


def _gradients(
    problem: Problem, saved: tuple[Tensor, ...], d_out: Tensor, d_lse: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    *given, out, lse, most, total = saved
    tensors = dict(zip(problem.names, given, strict=True))
    n = problem.counts
    d_out = d_out.contiguous()
    along_out = (d_out * out).sum(-1, dtype=torch.float64)
    delta = (along_out - d_lse).float()
    learned = any(want and _is_of_bias(name) for name, want in zip(problem.names, wanted, strict=True))
    arrays = _of_kernel(tensors) | {"most": most, "total": total, "d_out": d_out, "delta": delta.contiguous()}
    arrays |= {f"d_{name}": torch.zeros_like(tensors[name]) for name in ("q", "k", "v")}
    rows_shape = (n["batch"], n["heads"], n["queries"])
    if "logit_scale" in tensors:
        arrays["d_logit_scale"] = torch.zeros_like(lse)
    if "table" in tensors:
        arrays["table_t"] = tensors["table"].T.contiguous()
        arrays["d_table"] = lse.new_zeros(n["batch"], n["heads"], *tensors["table"].shape)
    else:
        sizes = [tensors[name].numel() for name in ("weight_in", "weight_out", "bias_in", "bias_out")]
        arrays["d_network"] = lse.new_zeros(n["batch"] * STRANDS, sum(sizes), dtype=torch.float64)
    if learned and "strip" in tensors:
        arrays["d_strip"] = lse.new_zeros(n["batch"], STRANDS, n["heads"], n["strip_length"])
    if learned and "slope" in tensors:
        arrays["d_slope"] = lse.new_zeros(rows_shape)
        arrays["d_query_level"] = lse.new_zeros(rows_shape, dtype=torch.float64)
        arrays["d_key_level"] = lse.new_zeros(n["batch"], n["heads"], n["keys"], dtype=torch.float64)
    gradients: dict[str, Tensor] = {}
    if out.numel():
        _run_backward(problem, tensors, arrays, gradients, learned)
    gradients |= {
        name.removeprefix("d_"): x for name, x in arrays.items() if name in ("d_q", "d_k", "d_v", "d_logit_scale")
    }
    of_sink = torch.zeros_like(lse)
    if "sink" in tensors:
        of_sink = (tensors["sink"] - lse).exp().where(lse != -torch.inf, 0)
        gradients["sink"] = -of_sink * delta
    if "logit_scale" in tensors:
        # The kernel sums d_scores (score - centre) over a row; the sum of d_scores alone is known.
        factor, centre = tensors["logit_scale"], most / tensors["logit_scale"]
        centre = centre.masked_fill((factor == 0) | (total == 0), 0)
        if "sink" in tensors:
            centre = centre.masked_fill(most == tensors["sink"], 0)
        whole = along_out * of_sink + d_lse * (1 - of_sink)
        gradients["logit_scale"] = (gradients["logit_scale"] + centre * whole).float().masked_fill(total == 0, 0)
    if "d_network" in arrays:
        gradients |= _of_network(arrays["d_network"].sum(0), tensors, n)
    if "d_table" in arrays:
        gradients["table"] = arrays["d_table"].sum((0, 1), dtype=torch.float64).float()
    if "d_strip" in arrays:
        gradients["strip"] = arrays["d_strip"].sum(1, dtype=torch.float64).sum_to_size(tensors["strip"].shape).float()
    if "d_slope" in arrays:
        gradients["key_level"] = F.pad(arrays["d_key_level"], (MARGIN, 2 * COLUMNS))
        gradients |= {"slope": arrays["d_slope"], "query_level": arrays["d_query_level"]}
        gradients |= {
            name: gradients[name].sum_to_size(tensors[name].shape) for name in ("slope", "query_level", "key_level")
        }
    return [gradients.get(name) if want else None for name, want in zip(problem.names, wanted, strict=True)]


def _run_backward(
    problem: Problem, tensors: dict[str, Tensor], arrays: dict[str, Tensor], gradients: dict[str, Tensor], learned: bool
) -> None:
    """The kernel, chunk by chunk; the gradients of a bias that is filled in go to `gradients`."""
    bias = problem.bias_of(tensors)
    if bias is None:
        for rows in problem.chunks():
            problem.run("backward", rows, arrays, None, learned=learned)
        return
    sources = {name: x.detach().requires_grad_() for name, x in bias.tensors().items() if x.is_floating_point()}
    bias = bias.rebuilt(sources)
    n = problem.counts
    for rows in problem.chunks():
        with torch.enable_grad():
            tile = rows_of(bias, rows)
        d_rows = arrays["q"].new_zeros(n["batch"], n["heads"], rows.stop - rows.start, n["keys"])
        problem.run("backward", rows, arrays | {"d_rows": d_rows}, _filled(tile.detach()), learned=learned)
        if not (learned and tile.requires_grad):
            continue
        parts = torch.autograd.grad(
            tile, list(sources.values()), d_rows.sum_to_size(tile.shape).to(tile.dtype), allow_unused=True
        )
        for name, part in zip(sources, parts, strict=True):
            if part is not None:
                key = f"bias.{name}"
                gradients[key] = part if key not in gradients else gradients[key] + part


def _of_network(sums: Tensor, tensors: dict[str, Tensor], n: dict[str, int]) -> dict[str, Tensor]:
    """The gradients of the layers, which the kernel sums as tap x hidden x input and tap x hidden x output."""
    hidden, kernel = n["hidden_channels"], n["kernel"]
    names = ("weight_in", "weight_out", "bias_in", "bias_out")
    into, out_of, bias_in, bias_out = sums.float().split([tensors[name].numel() for name in names])
    return {
        "weight_in": into.view(kernel, hidden, -1).transpose(1, 2),
        "weight_out": out_of.view(kernel, hidden, -1),
        "bias_in": bias_in,
        "bias_out": bias_out,
    }


def _of_kernel(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not name.startswith("bias.")}


def _is_of_bias(name: str) -> bool:
    return name.startswith("bias.") or name in ("strip", "query_level", "key_level", "slope")


def _filled(tile: Tensor) -> Tensor:
    return tile.float().contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """How far the next entry of each axis is, 0 where one stands for all."""
    return tuple(0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))
