"""What works on this machine: every backend tried on a small call of every kind, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lengthwise.attention import BACKENDS, checked_call, choose
from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    FunctionBias,
    Index,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    SumBias,
    registered,
)
from lengthwise.rescore import ContextualPositions, HeadNetwork, ScoreFunction
from lengthwise.token_layout import Band, TokenLayout, layout

LENGTH, HEADS, DIM = 24, 2, 16

COMPILED = (
    "Under torch.compile and torch.export row_block is one node of the graph; functions that are not registered are\n"
    "the reference there. On other devices the authors tried nothing: `lengthwise info --prove --device cuda` proves\n"
    "and measures there."
)


@dataclass(frozen=True)
class Verdict:
    """How a backend fared with one kind of call: `fault` is None where it gave the reference's output and gradients."""

    backend: str
    kind: str
    fault: str | None


@registered
def parabola(rows: Index, columns: Index, query: Tensor, key: Tensor, steepness: Tensor) -> Tensor:
    """A small function of two positions, for trying."""
    return -steepness[:, None, None] * (query[:, None, rows, None] - key[:, None, None, columns]) ** 2


def try_backends() -> Iterator[Verdict]:
    """Every backend with every kind of call."""
    for kind, make_call in CALLS.items():
        for backend in BACKENDS:
            yield Verdict(backend, kind, _fault(backend, make_call(LENGTH, DIM)))


def report() -> str:
    """Versions, and a table of verdicts with the reasons below."""
    verdicts = list(try_backends())
    where = f"torch {torch.__version__}, {torch.get_num_threads()} threads, devices: {', '.join(_devices())}"
    lines = [where, "", "What works, forward and backward:", ""]
    width = max(len(kind) for kind in CALLS)
    lines.append(" " * width + "".join(f"  {backend:>10}" for backend in BACKENDS) + "  auto takes")
    for kind, make_call in CALLS.items():
        marks = ["yes" if v.fault is None else "no" for v in verdicts if v.kind == kind]
        taken = choose(make_call(LENGTH, DIM))[0]
        lines.append(kind.ljust(width) + "".join(f"  {mark:>10}" for mark in marks) + f"  {taken}")
    reasons = dict.fromkeys((v.backend, v.fault) for v in verdicts if v.fault)
    lines += ["", *(f"{backend}: {fault}" for backend, fault in reasons), "", COMPILED]
    return "\n".join(lines)


def _fault(backend: str, call: AttentionCall) -> str | None:
    refusal = BACKENDS[backend].plan(call)
    if isinstance(refusal, Refusal):
        return "; ".join(refusal.reasons)
    expected, got = _outputs("reference", call), _outputs(backend, call)
    # Two roads in float32 over 24 keys: far above their rounding, far below a fault.
    good = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(expected, got, strict=True))
    return None if good else "output or gradients differ from the reference"


def _outputs(backend: str, call: AttentionCall) -> list[Tensor]:
    """The output, the log-sum-exp where it is asked for, and the gradients of queries, keys and values."""
    module = BACKENDS[backend]
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    call = replace(call, q=q, k=k, v=v)
    out, lse = module.run(call, module.plan(call))
    outputs = [out, lse] if call.return_lse else [out]
    return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), (q, k, v))]


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] + ([f"{accelerator.type} (untested)"] if accelerator else [])


def _call(
    length: int,
    dim: int,
    bias: Callable[[Tensor], Bias] | None = None,
    where: TokenLayout | None = None,
    key_heads: int = HEADS,
    **options: object,
) -> AttentionCall:
    """On the default device."""
    q, k, v = _normal(0, 3, 1, HEADS, length, dim)
    q, k, v = (x.requires_grad_() for x in (q, k[:, :key_heads], v[:, :key_heads]))
    where = layout(length, device=torch.get_default_device()) if where is None else where
    return checked_call(q, k, v, layout=where, bias=bias and bias(where.query), **options)  # type: ignore[arg-type]


def _normal(seed: int, *shape: int) -> Tensor:
    """The same numbers on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def _table(positions: Tensor) -> DistanceBias:
    length = positions.shape[1]
    table = torch.linspace(0, -2, HEADS * length).view(HEADS, length).requires_grad_()
    return DistanceBias(table, positions, positions)


def _profiles(positions: Tensor) -> QueryDistanceBias:
    length = positions.shape[1]
    rows = torch.linspace(-1, 1, HEADS * length * 3).view(1, HEADS, length, 3).requires_grad_()
    profiles = torch.linspace(1, -2, 3 * 9).view(1, 3, 9).requires_grad_()
    return QueryDistanceBias(rows, profiles, positions, positions)


def _levels(positions: Tensor) -> LevelBias:
    level = positions[None].double()
    return LevelBias(level, level, torch.full((1, HEADS, 1), 0.5).requires_grad_())


def _curved_levels(positions: Tensor) -> LevelBias:
    return replace(_levels(positions), curve="log1p_square")


def _few_queries(length: int, dim: int) -> AttentionCall:
    """The last ones, of so many keys."""
    call = _call(length, dim)
    queries = min(length, 3)
    return checked_call(
        call.q[:, :, -queries:], call.k, call.v, layout=layout(queries, past=length - queries, device=call.q.device)
    )


def _lines(positions: Tensor) -> LineBias:
    length = positions.shape[1]
    curve = DistanceBias(torch.arange(length).float().log1p()[None], positions, positions)
    slope, intercept = torch.tensor([[-1.0, -2.0]] * HEADS), torch.tensor([[0.0, 1.0]] * HEADS)
    return LineBias(curve, torch.ones(1, length), torch.tensor([1.0]), slope.requires_grad_(), intercept)


def _function(positions: Tensor) -> FunctionBias:
    return FunctionBias(parabola, (positions, positions, torch.tensor([0.1, 0.2], requires_grad=True)))


def _dense(positions: Tensor) -> DenseBias:
    length = positions.shape[1]
    return DenseBias(torch.zeros(1, HEADS, length, length, requires_grad=True))


def _sum(positions: Tensor) -> SumBias:
    return SumBias((_table(positions), _levels(positions)))


@registered
def squashed(content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice) -> Tensor:
    """A small function of scores, for trying."""
    return content.tanh() + bias


def _network() -> HeadNetwork:
    shapes = (5, 2 * HEADS, 3), (5,), (HEADS, 5, 3), (HEADS,)
    return HeadNetwork(*(0.3 * _normal(seed, *shape) for seed, shape in enumerate(shapes)))


CALLS: dict[str, Callable[[int, int], AttentionCall]] = {
    "no bias": _call,
    "DistanceBias": lambda length, dim: _call(length, dim, _table),
    "QueryDistanceBias": lambda length, dim: _call(length, dim, _profiles),
    "LevelBias": lambda length, dim: _call(length, dim, _levels),
    "LevelBias, curved": lambda length, dim: _call(length, dim, _curved_levels),
    "LineBias": lambda length, dim: _call(length, dim, _lines),
    "FunctionBias": lambda length, dim: _call(length, dim, _function),
    "DenseBias": lambda length, dim: _call(length, dim, _dense),
    "SumBias": lambda length, dim: _call(length, dim, _sum),
    "HeadNetwork": lambda length, dim: _call(length, dim, _table, rescore=_network()),
    "ContextualPositions": lambda length, dim: _call(length, dim, rescore=ContextualPositions(torch.ones(dim, 9))),
    "ScoreFunction": lambda length, dim: _call(length, dim, rescore=ScoreFunction(squashed)),
    "window": lambda length, dim: _call(length, dim, _table, window=5),
    "not causal": lambda length, dim: _call(
        length, dim, _levels, where=layout(length, causal=False, device=torch.get_default_device())
    ),
    "documents": lambda length, dim: _call(
        length, dim, _table, where=layout(length, documents=torch.arange(length)[None] // 7)
    ),
    "padding": lambda length, dim: _call(
        length, dim, _levels, where=layout(length, key_mask=torch.arange(length)[None] >= length // 4)
    ),
    "bands": lambda length, dim: _call(length, dim, _levels, window=(Band(0, 5), Band(first=2))),
    "shared keys": lambda length, dim: _call(length, dim, _levels, key_heads=1),
    "few queries": _few_queries,
    "sink": lambda length, dim: _call(length, dim, _table, sink=torch.zeros(HEADS)),
    "logit scale": lambda length, dim: _call(
        length, dim, _table, logit_scale=torch.linspace(0.5, 2, length).view(1, 1, -1)
    ),
    "softcap": lambda length, dim: _call(length, dim, _table, softcap=2.0),
    "log-sum-exp": lambda length, dim: _call(length, dim, _table, return_lse=True),
}
"""Calls of every kind, by their length and the width of their heads."""
