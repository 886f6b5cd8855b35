"""Calls for the tests of row_block: every kind of bias in every situation, and what it means to agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lengthwise.attention import reference, row_block
from lengthwise.attention.call import Call, checked_call
from lengthwise.attention.row_block import few_rows, tiles
from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, LevelBias, registered

HEADS, DIM, VALUE = 3, 7, 5
Tensors = dict[str, Tensor]


def cut_small(monkeypatch: pytest.MonkeyPatch, rows: int = 32, columns: int = 48) -> None:
    """Tiles so small that every case has several of each sort, and none is done without tiles."""
    monkeypatch.setattr(tiles, "ROWS", rows)
    monkeypatch.setattr(tiles, "COLUMNS", columns)
    monkeypatch.setattr(tiles, "HEADS", 2)
    monkeypatch.setattr(few_rows, "FEW", 0)


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


def position(t: Tensors) -> Bias:
    return LevelBias(t["query"].double()[:, None], t["key"].double()[:, None], t["slope"])


def function(t: Tensors) -> Bias:
    return FunctionBias(kernel_tile, (t["query"], t["key"], t["inner"], t["outer"]))


def dense(t: Tensors) -> Bias:
    return DenseBias(t["value"])


KINDS: dict[str, Callable[[Tensors], Bias | None]] = {
    "none": none,
    "strip": distance,
    "two-sided strip": two_sided,
    "gaps": distance,
    "level": level,
    "shared level": position,
    "wild level": level,
    "function": function,
    "dense": dense,
}
SITUATIONS = (
    *("causal", "two-sided", "window", "two-sided window", "documents"),
    *("padding", "everything", "few", "start", "grouped"),
)


@dataclass
class Case:
    """Tensors by name, and how a bias is made of them, so that the same case exists in every precision."""

    tensors: Tensors
    kind: str
    masks: dict[str, Any]

    @property
    def floating(self) -> list[str]:
        """The names of the tensors that have a gradient."""
        return [name for name, x in self.tensors.items() if x.is_floating_point()]

    def rounded(self, dtype: torch.dtype) -> "Case":
        """The case with numbers of this precision; levels stay float64, as they always are."""
        rounded = [name for name in self.floating if not name.startswith("level")]
        return Case(self.tensors | {name: self.tensors[name].to(dtype) for name in rounded}, self.kind, self.masks)

    def call(self, dtype: torch.dtype, *, grad: bool = True) -> tuple[Call, list[Tensor]]:
        """The call in this precision, and everything that has a gradient."""
        own = {name: x.clone() for name, x in self.rounded(dtype).tensors.items()}
        return self.of(own), [own[name].requires_grad_(grad) for name in self.floating]

    def of(self, tensors: Tensors) -> Call:
        """The call with other tensors of the same names."""
        t = tensors
        return checked_call(t["q"], t["k"], t["v"], bias=KINDS[self.kind](t), **self.masks)


def make_case(kind: str, situation: str = "causal", keys: int = 101, batch: int = 2) -> Case:
    torch.manual_seed(len(kind) + 31 * len(situation) + keys)
    queries = max(1, keys // 3) if situation in ("few", "start") else keys
    first = max(0, keys - queries - 2) if situation == "start" else keys - queries
    shared = 1 if situation == "grouped" else HEADS
    x = {
        "q": torch.randn(batch, HEADS, queries, DIM),
        "k": torch.randn(batch, shared, keys, DIM),
        "v": torch.randn(batch, shared, keys, VALUE),
    }
    documents = (torch.rand(batch, keys) < 0.05).cumsum(1)
    padding = torch.arange(keys) >= torch.tensor([[keys // 5], [0]])[:batch]
    masks: dict[str, dict[str, Any]] = {
        "two-sided": {"causal": False},
        "window": {"window": 23},
        "two-sided window": {"window": 23, "causal": False},
        "documents": {"documents": documents},
        "padding": {"key_mask": padding},
        "everything": {"documents": documents, "key_mask": padding, "window": 30},
        "start": {"start": torch.tensor(first)},
    }
    return Case(x | of_bias(kind, batch, keys, slice(first, first + queries)), kind, masks.get(situation, {}))


def of_bias(kind: str, batch: int, keys: int, rows: slice) -> Tensors:
    """The tensors that a bias is made of; `rows` are the slots of the queries."""
    queries, at = rows.stop - rows.start, torch.arange(keys)[None]
    x: Tensors = {}
    if kind == "gaps":
        at = torch.randint(1, 4, (batch, keys)).cumsum(1)
    if kind in ("strip", "two-sided strip", "gaps"):
        x["table"] = torch.randn(HEADS, 41)
    elif kind == "level":
        x["level_k"] = torch.rand(batch, HEADS, keys, dtype=torch.float64).cumsum(-1)
        x["level_q"] = x["level_k"][..., rows] + 0.01
        x["slope"] = torch.rand(batch, HEADS, queries)
    elif kind == "shared level":
        x["slope"] = torch.rand(1, HEADS, 1)
    elif kind == "wild level":
        x["level_k"] = torch.randn(1, 1, keys, dtype=torch.float64)
        x["level_q"] = torch.randn(1, HEADS, queries, dtype=torch.float64)
        x["slope"] = torch.randn(batch, 1, queries)
    elif kind == "function":
        x["inner"], x["outer"] = torch.randn(11), torch.randn(11, HEADS)
    elif kind == "dense":
        x["value"] = torch.randn(1, HEADS, queries, keys)
    return x | {"query": at[:, rows].clone(), "key": at}


def results(attend: Callable[[Call], Tensor], call: Call, learned: list[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of everything that is learned."""
    out = attend(call)
    return [out.detach(), *torch.autograd.grad(out, learned, d_out.to(out.dtype))]


def assert_as_exact(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    given = case.rounded(dtype)
    q, k, v = (case.tensors[name] for name in "qkv")
    d_out = torch.randn(*q.shape[:3], v.shape[3]).to(dtype)
    roads = (reference.attend, torch.float64), (reference.attend, dtype), (row_block.attend, dtype)
    exact, theirs, ours = (results(attend, *given.call(precision), d_out) for attend, precision in roads)
    for name, truth, plain, found in zip(["out", *case.floating], exact, theirs, ours, strict=True):
        assert found.dtype == plain.dtype
        # A gradient that cancels to nothing was still made of numbers of the size of d_out; a slope's, times distances.
        unit = d_out.double().norm() * (k.shape[2] if name == "slope" else 1)
        rounding = max(truth.norm(), unit) * torch.finfo(dtype).eps
        assert (found - truth).norm() <= 2 * (plain - truth).norm() + rounding, name
