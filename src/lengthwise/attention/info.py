"""What works on this machine: every backend tried on a small call of every kind, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lengthwise.attention import BACKENDS, choose
from lengthwise.attention.call import Call, checked_call
from lengthwise.attention.reference import attend as by_definition
from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, Index, LevelBias, registered

LENGTH, HEADS, DIM = 24, 2, 8

COMPILED = (
    "Under torch.compile and torch.export row_block is one node of the graph; rescore, and functions without\n"
    "registered, are the reference there. On devices other than the CPU nothing was tried."
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


def survey() -> Iterator[Verdict]:
    """Every backend with every kind of call."""
    for kind, make_call in CALLS.items():
        for backend in BACKENDS:
            yield Verdict(backend, kind, _fault(backend, make_call()))


def report() -> str:
    """Versions, and a table of verdicts with the reasons below."""
    verdicts = list(survey())
    where = f"torch {torch.__version__}, {torch.get_num_threads()} threads, devices: {', '.join(_devices())}"
    lines = [where, "", "What works, forward and backward:", ""]
    width = max(len(kind) for kind in CALLS)
    lines.append(" " * width + "".join(f"  {backend:>10}" for backend in BACKENDS) + "  auto takes")
    for kind, make_call in CALLS.items():
        marks = ["yes" if v.fault is None else "no" for v in verdicts if v.kind == kind]
        lines.append(kind.ljust(width) + "".join(f"  {mark:>10}" for mark in marks) + f"  {choose(make_call())}")
    reasons = dict.fromkeys((v.backend, v.fault) for v in verdicts if v.fault)
    lines += ["", *(f"{backend}: {fault}" for backend, fault in reasons), "", COMPILED]
    return "\n".join(lines)


def _fault(backend: str, call: Call) -> str | None:
    if objections := BACKENDS[backend].objections(call):
        return "; ".join(objections)
    expected, found = _tried(by_definition, call), _tried(BACKENDS[backend].attend, call)
    # Two roads in float32 over 24 keys: far above their rounding, far below a fault.
    good = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(expected, found, strict=True))
    return None if good else "output or gradients differ from the reference"


def _tried(run: Callable[[Call], Tensor], call: Call) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    out = run(replace(call, q=q, k=k, v=v))
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] + ([f"{accelerator.type} (untested)"] if accelerator else [])


def _call(bias: Callable[[Tensor], Bias] | None = None, **options: object) -> Call:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM, generator=generator).requires_grad_()
    positions = torch.arange(LENGTH)[None]
    return checked_call(q, k, v, bias=bias and bias(positions), **options)  # type: ignore[arg-type]


def _table(positions: Tensor) -> Bias:
    return DistanceBias(
        torch.linspace(0, -2, HEADS * LENGTH).view(HEADS, LENGTH).requires_grad_(), positions, positions
    )


def _levels(positions: Tensor) -> Bias:
    return LevelBias(
        positions[None].double(), positions[None].double(), torch.full((1, HEADS, 1), 0.5).requires_grad_()
    )


def _function(positions: Tensor) -> Bias:
    return FunctionBias(parabola, (positions, positions, torch.tensor([0.1, 0.2], requires_grad=True)))


def _dense(positions: Tensor) -> Bias:
    return DenseBias(torch.zeros(1, HEADS, LENGTH, LENGTH, requires_grad=True))


CALLS: dict[str, Callable[[], Call]] = {
    "no bias": _call,
    "DistanceBias": lambda: _call(_table),
    "LevelBias": lambda: _call(_levels),
    "FunctionBias": lambda: _call(_function),
    "DenseBias": lambda: _call(_dense),
    "rescore": lambda: _call(rescore=lambda content, bias, q, mask: content.tanh() + bias),
    "window": lambda: _call(_table, window=5),
    "not causal": lambda: _call(_levels, causal=False),
}
