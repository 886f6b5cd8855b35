"""Calls for the tests of row_block: every kind of bias in every situation, and what it means to agree."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from rounding import Inside, Tensors, assert_within_rounding, rounding_noise
from torch import Tensor

from lengthwise.attention import call as calls
from lengthwise.attention import custom_op, run
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.row_block import tiles
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    FunctionBias,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    SumBias,
    at_least_float32,
    registered,
    two_floats,
)
from lengthwise.token_layout import Band, TokenLayout

HEADS, DIM, VALUE = 3, 7, 5
Attend = Callable[[AttentionCall], tuple[Tensor, Tensor]]


def by_reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp by definition."""
    return _both(call, "reference")


def by_row_block(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp in tiles."""
    return _both(call, "row_block")


def operator_arguments(call: AttentionCall) -> tuple[Any, ...]:
    """What the operators of a backend are given for a call."""
    parts = custom_op._take_apart(call, named=True, notes={})
    text = custom_op._to_text(list(parts.tensors), list(parts.ints), parts.plain)
    lists = [x.detach().requires_grad_(x.requires_grad) for x in parts.tensors.values()], list(parts.ints.values())
    return call.q, call.k, call.v, *lists, call.scale, call.softcap, text


def _both(call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    out, lse = run(replace(call, return_lse=True), backend)
    assert lse is not None
    return out, lse


def cut_small(monkeypatch: pytest.MonkeyPatch, rows: int = 32, columns: int = 48) -> None:
    """Tiles so small that every case has several of each sort, and none is done without tiles."""
    monkeypatch.setattr(tiles, "ROWS", rows)
    monkeypatch.setattr(tiles, "COLUMNS", columns)
    monkeypatch.setattr(tiles, "HEADS", 2)
    monkeypatch.setattr(calls, "FEW_QUERIES", 0)


@registered
def kernel_tile(rows: Any, columns: Any, query: Tensor, key: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    way = (query[..., rows, None] - key[..., None, columns]).abs().to(inner.dtype)
    x = torch.log1p(way) / torch.log1p(query[..., rows, None].clamp(min=31).to(inner.dtype))
    return (torch.relu(x[..., None] * inner - 0.3) @ outer).movedim(-1, -3)


def none(_: Tensors) -> None:
    return None


def distance(t: Tensors) -> Bias:
    return DistanceBias(t["table"], t["query"], t["key"])


def two_sided(t: Tensors) -> Bias:
    return DistanceBias(t["table"], t["query"], t["key"], first=-20)


def level(t: Tensors) -> Bias:
    return LevelBias(t["level_q"], t["level_k"], t["slope"])


def curved_level(t: Tensors) -> Bias:
    return LevelBias(t["level_q"], t["level_k"], t["slope"], curve="log1p_square")


def level_in_two(t: Tensors) -> Bias:
    (query, query_rest), (key, key_rest) = (two_floats(t[name]) for name in ("level_q", "level_k"))
    return LevelBias(query, key, t["slope"], query_rest=query_rest, key_rest=key_rest)


def position(t: Tensors) -> Bias:
    return LevelBias(t["query"].double()[:, None], t["key"].double()[:, None], t["slope"])


def lines(t: Tensors) -> Bias:
    """Straight lines that meet at the knots, as a LineBias's do."""
    knots, slope = torch.tensor([0.5, 1.0, 1.75]).to(t["line"].dtype), at_least_float32(t["line"])
    steps = (slope[:, :-1] - slope[:, 1:]) * knots
    intercept = torch.cat([at_least_float32(t["intercept"]), steps], 1).cumsum(1)
    return LineBias(DistanceBias(t["curve"], t["query"], t["key"]), t["factor"], knots, slope, intercept)


def profiles(t: Tensors) -> Bias:
    return QueryDistanceBias(t["rows"], t["profiles"], t["query"], t["key"])


def profiles_of_keys(t: Tensors) -> Bias:
    return QueryDistanceBias(t["rows"], t["profiles"], t["query"], t["key"], -20, "key", "zero")


def function(t: Tensors) -> Bias:
    return FunctionBias(kernel_tile, (t["query"], t["key"], t["inner"], t["outer"]))


def dense(t: Tensors) -> Bias:
    return DenseBias(t["value"])


def total(t: Tensors) -> Bias:
    return SumBias((distance(t), level(t)))


KINDS: dict[str, Callable[[Tensors], Bias | None]] = {
    "none": none,
    "strip": distance,
    "two-sided strip": two_sided,
    "one-head strip": distance,
    "gaps": distance,
    "level": level,
    "shared level": position,
    "wild level": level,
    "curved level": curved_level,
    "level in two": level_in_two,
    "lines": lines,
    "profiles": profiles,
    "profiles of keys": profiles_of_keys,
    "function": function,
    "dense": dense,
    "one-head dense": dense,
    "sum": total,
}
SITUATIONS = (
    *("causal", "two-sided", "window", "two-sided window", "documents", "documents in pieces"),
    *("padding", "everything", "few", "start", "grouped", "mask", "mask by head", "bands", "chunks", "behind"),
    *("sink", "softcap", "logit scale", "all options"),
)


@dataclass
class Case:
    """Tensors by name, and how a bias is made of them, so that the same case exists in every precision."""

    tensors: Tensors
    kind: str
    masks: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def floating(self) -> list[str]:
        """The names of the tensors that have a gradient."""
        return [name for name, x in self.tensors.items() if x.is_floating_point()]

    def rounded(self, dtype: torch.dtype) -> "Case":
        """The case with numbers of this precision; levels stay float64, as they always are."""
        rounded = [name for name in self.floating if not name.startswith("level")]
        return replace(self, tensors=self.tensors | {name: self.tensors[name].to(dtype) for name in rounded})

    def call(self, dtype: torch.dtype, *, grad: bool = True) -> tuple[AttentionCall, list[Tensor]]:
        """The call in this precision, and everything that has a gradient."""
        own = {name: x.clone() for name, x in self.rounded(dtype).tensors.items()}
        learned = [own[name].requires_grad_(grad) for name in self.floating]
        return self.of(own), learned

    def of(self, tensors: Tensors) -> AttentionCall:
        """The call with other tensors of the same names."""
        t = tensors
        layout = TokenLayout.of(t["query"], t["key"], **self.masks)
        extras = {name: t[name] for name in ("sink", "logit_scale") if name in t}
        return checked_call(t["q"], t["k"], t["v"], layout=layout, bias=KINDS[self.kind](t), **self.options, **extras)


def make_case(kind: str, situation: str = "causal", keys: int = 101, batch: int = 2) -> Case:
    torch.manual_seed(len(kind) + 31 * len(situation) + keys)
    queries = max(1, keys // 3) if situation in ("few", "start", "behind") else keys
    first = {"start": max(0, keys - queries - 2), "behind": keys + 2}.get(situation, keys - queries)
    shared = 1 if situation == "grouped" else HEADS
    x = {
        "q": torch.randn(batch, HEADS, queries, DIM),
        "k": torch.randn(batch, shared, keys, DIM),
        "v": torch.randn(batch, shared, keys, VALUE),
    }
    own = torch.Generator().manual_seed(len(kind) + 31 * len(situation) + keys)
    if situation in ("sink", "all options"):
        x["sink"] = (
            torch.randn(batch, HEADS, queries, generator=own)
            if situation == "all options"
            else torch.randn(HEADS, generator=own)
        )
    if situation in ("logit scale", "all options"):
        # Rows with a factor of 0 or below are as good as any.
        x["logit_scale"] = (torch.rand(1, HEADS, queries, generator=own) * 2 - 0.3) * (
            torch.rand(1, 1, queries, generator=own) > 0.1
        )
    documents = (torch.rand(batch, keys) < 0.05).cumsum(1)
    padding = torch.arange(keys) >= torch.tensor([[keys // 5], [0]])[:batch]
    holes = padding & (torch.rand(batch, keys, generator=own) < 0.9)
    masks: dict[str, dict[str, Any]] = {
        "two-sided": {"causal": False},
        "two-sided window": {"causal": False},
        "documents": {"documents": documents},
        "documents in pieces": {"documents": documents % 2, "key_mask": holes},
        "padding": {"key_mask": padding},
        "everything": {"documents": documents, "key_mask": padding},
        "start": {"start": torch.tensor(first)},
        "behind": {"start": first},
        "mask": {"mask": torch.rand(batch, 1, keys, keys, generator=own) < 0.5},
        "mask by head": {"mask": torch.rand(1, HEADS, keys, keys, generator=own) < 0.5},
        "bands": {"key_mask": holes},
        "chunks": {"documents": documents},
    }
    options: dict[str, dict[str, Any]] = {
        "window": {"window": 23},
        "two-sided window": {"window": 23},
        "everything": {"window": 30},
        "bands": {"window": (Band(0, 9), Band(20, 40), Band(45, first=4))},
        "chunks": {"window": Band(1, 4, chunk=5)},
        "softcap": {"softcap": 1.5},
        "all options": {"softcap": 1.5, "window": 60, "scale": 0.7},
    }
    of_kind = of_bias(kind, batch, keys, slice(first, first + queries))
    return Case(x | of_kind, kind, masks.get(situation, {}), options.get(situation, {}))


def of_bias(kind: str, batch: int, keys: int, rows: slice) -> Tensors:
    """The tensors that a bias is made of; `rows` are the slots of the queries, which may lie behind the keys."""
    queries, at = rows.stop - rows.start, torch.arange(max(keys, rows.stop))[None]
    x: Tensors = {}
    if kind == "gaps":
        at = torch.randint(1, 4, (batch, at.shape[1])).cumsum(1)
    if kind in ("strip", "two-sided strip", "gaps", "sum", "one-head strip"):
        x["table"] = torch.randn(1 if kind == "one-head strip" else HEADS, 41)
    if kind in ("level", "curved level", "level in two", "sum"):
        levels = torch.rand(batch, HEADS, at.shape[1], dtype=torch.float64).cumsum(-1)
        x["level_k"] = levels[..., :keys].clone()
        x["level_q"] = levels[..., rows] + 0.01
        x["slope"] = torch.rand(batch, HEADS, queries)
    elif kind == "shared level":
        x["slope"] = torch.rand(1, HEADS, 1)
    elif kind == "wild level":
        x["level_k"] = torch.randn(1, 1, keys, dtype=torch.float64)
        x["level_q"] = torch.randn(1, HEADS, queries, dtype=torch.float64)
        x["slope"] = torch.randn(batch, 1, queries)
    elif kind == "lines":
        x["curve"] = torch.rand(1, 61).cumsum(1) / 10
        x["factor"], x["line"], x["intercept"] = torch.rand(1, queries), torch.randn(HEADS, 4), torch.randn(HEADS, 1)
    elif kind == "profiles":
        x["rows"], x["profiles"] = torch.randn(batch, HEADS, queries, 3), torch.randn(1, 3, 41)
    elif kind == "profiles of keys":
        x["rows"], x["profiles"] = torch.randn(batch, 1, keys, 3), torch.randn(HEADS, 3, 41)
    elif kind == "function":
        x["inner"], x["outer"] = torch.randn(11), torch.randn(11, HEADS)
    elif kind in ("dense", "one-head dense"):
        x["value"] = torch.randn(1, HEADS, queries, keys) if kind == "dense" else torch.randn(batch, 1, queries, keys)
    return x | {"query": at[:, rows].clone(), "key": at[:, :keys].clone()}


def upstream(case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of the output and of the log-sum-exp."""
    q, v = case.tensors["q"], case.tensors["v"]
    return torch.randn(*q.shape[:3], v.shape[3]), torch.randn(q.shape[:3])


def results(
    attend: Attend, call: AttentionCall, learned: list[Tensor], d_out: Tensor, d_lse: Tensor | None = None
) -> list[Tensor]:
    """The output, the log-sum-exp and the gradients of everything that is learned."""
    out, lse = attend(call)
    above = [d_out.to(out.dtype), torch.zeros_like(lse) if d_lse is None else d_lse.to(lse.dtype)]
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], learned, above)]


def assert_as_exact(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    _assert_as_exact(case, dtype, upstream(case)[0].to(dtype), None)


def assert_lse_as_exact(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """The same where a gradient comes through the log-sum-exp alone."""
    d_out, d_lse = upstream(case)
    _assert_as_exact(case, dtype, torch.zeros_like(d_out), d_lse)


def _assert_as_exact(case: Case, dtype: torch.dtype, d_out: Tensor, d_lse: Tensor | None) -> None:
    case = case.rounded(dtype)
    roads = (by_row_block, dtype), (by_reference, dtype), (by_reference, torch.float64)
    ours, plain, exact = (_named(case, results(road, *case.call(of), d_out, d_lse)) for road, of in roads)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    call, learned = case.call(torch.float64)
    noise = rounding_noise(Inside.of(call), d_out, d_lse, dict(zip(case.floating, learned, strict=True)), eps=eps)
    assert_within_rounding(ours, plain, exact, noise, terms=call.keys, eps=eps)


def _named(case: Case, values: list[Tensor]) -> Tensors:
    return dict(zip(["out", "lse", *case.floating], values, strict=True))
