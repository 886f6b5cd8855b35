"""Compile the Triton kernels of a call for a card that need not be there, and read what the machine code needs.

    python tests/triton_targets.py 80 90        registers, stack and shared memory of every kernel and kind

A process of its own: where TRITON_INTERPRET is 1 nothing can be compiled.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import lengthwise as lw
from lengthwise.attention import checked_call
from lengthwise.attention.triton import TritonPlan, bounds, inputs, passes, plan, tiles

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
KERNELS = ("forward_kernel", "drop_kernel", "rows_kernel", "keys_kernel", "bands_kernel", "entries_kernel")
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PRODUCTS = 16
"""A loop with so many instructions that multiply is one over tiles."""
ATOMIC, TF32 = re.compile(r"\b(ATOMG?|REDG?|ATOMS\.ADD)\b"), re.compile(r"\.TF32")
"""ATOMS.OR and ATOMS.AND are how the compiler keeps book of Blackwell's tensor memory; nothing is added there."""


@dataclass(frozen=True)
class Needs:
    """What one kernel's machine code needs."""

    kernel: str
    registers: int
    stack: int
    shared: int
    loop: int
    """Instructions of the shortest loop that multiplies matrices: a tile which all rows see whole."""
    has_atomic: bool
    has_tf32: bool


class Recorder:
    """In the place of a kernel: remembers what it was launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: self.launches.append((self.kernel, args, named))


def launches_of(call: Any, capability: tuple[int, int]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Every kernel that a call launches, forward and backward, with its arguments."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    plain = {name: getattr(passes, name) for name in KERNELS}
    bounding, shortest, tile_for = bounds.bounds_kernel, tiles.SHORTEST, inputs.tile_for
    for name in KERNELS:
        setattr(passes, name, Recorder(plain[name], launches))
    # As it is at lengths that skip.
    bounds.bounds_kernel, tiles.SHORTEST = Recorder(bounding, launches), 0
    inputs.tile_for = lambda *sort: tiles.tile_for(*sort[:-1], capability)
    try:
        os.environ["TRITON_INTERPRET"] = "1"  # a plan refuses the CPU otherwise
        own = plan(call)
        assert isinstance(own, TritonPlan), own
        os.environ["TRITON_INTERPRET"] = "0"
        out, lse = passes.forward(call, own.notes)
        passes.backward(call, own.notes, torch.zeros_like(out), torch.zeros_like(lse), out, lse)
    finally:
        os.environ["TRITON_INTERPRET"] = "0"
        bounds.bounds_kernel, tiles.SHORTEST, inputs.tile_for = bounding, shortest, tile_for
        for name, x in plain.items():
            setattr(passes, name, x)
    return launches


def compiled(kernel: Any, args: tuple[Any, ...], named: dict[str, Any], target: GPUTarget) -> Any:
    """The machine code of one launch."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages")}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def typed(x: Any, path: tuple[int, ...], plain: bool) -> Any:
        if isinstance(x, tuple):
            return type(x)(*(typed(part, (*path, n), plain) for n, part in enumerate(x)))
        if isinstance(x, Tensor) or (isinstance(x, int) and not plain and x % 16 == 0 and x):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(x, Tensor):
            return TYPES[x.dtype]
        if isinstance(x, int | float) and (plain or x != 1):
            return "fp32" if isinstance(x, float) else "i32"
        constants[path] = x
        return "constexpr"

    for n, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in named:
            signature[name], constants[(n,)] = "constexpr", values[name]
        else:
            signature[name] = typed(values[name], (n,), parameter.do_not_specialize)
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def needs_of(code: Any, kernel: str) -> Needs:
    """By the disassemblers that come with Triton; stack is where spills go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage = run(BINARIES / "cuobjdump", "-res-usage", file.name)
        text = run(BINARIES / "nvdisasm", "-c", file.name)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    marks = bool(ATOMIC.search(text)), bool(TF32.search(text))
    return Needs(kernel, registers, stack, code.metadata.shared, shortest_loop(text), *marks)


def shortest_loop(text: str) -> int:
    """How many instructions the shortest loop with a matrix product has; 0 if there is none."""
    labels: dict[str, int] = {}
    lengths, products, count = [], [0], 0
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            count += 1
            products.append(products[-1] + bool(re.search(r"\b(HMMA|HGMMA|FFMA|UTCHMMA)\b", line)))
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if target and target[1] in labels:
                begin = labels[target[1]]
                matrix = products[count] - products[begin] >= PRODUCTS
                lengths += [count - begin] if matrix else []
    return min(lengths, default=0)


def run(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def call_of(kind: str, dtype: torch.dtype = torch.bfloat16, dim: int = 64, length: int = 256) -> Any:
    """A causal call with a learned bias of a kind."""
    q, k, v = (torch.zeros(1, 2, length, dim, dtype=dtype) for _ in range(3))
    layout = lw.layout(length)
    if kind == "few queries":
        return checked_call(q[:, :, :4], k, v, layout=lw.layout(4, past=length - 4))
    extras: dict[str, Any] = {}
    if kind == "extras":
        numbers = torch.ones(1, 2, length)
        extras = {"softcap": 30.0, "logit_scale": numbers, "sink": numbers}
        extras["window"] = (lw.Band(0, 64), lw.Band(first=4))
    if kind == "gathered":  # read by positions, which do not follow the slots
        layout = lw.TokenLayout.of(2 * layout.query, 2 * layout.query, start=0)
    if kind == "masked":
        k, v = k[:, :1], v[:, :1]  # which both heads share
        layout = lw.layout(length, key_mask=torch.arange(length)[None] > 2, documents=torch.arange(length)[None] // 50)
    at, positions = layout.query, torch.arange(length, dtype=torch.float64)[None, None]
    table = lw.DistanceBias(torch.zeros(2, length, requires_grad=True), at, at)
    slope = torch.ones(1, 2, 1, requires_grad=True)
    curve = lw.DistanceBias(torch.arange(length).float().log1p()[None].requires_grad_(), at, at)
    lines = torch.ones(2, 33, requires_grad=True)
    rows = torch.zeros(1, 2, length, 16, requires_grad=True)
    profiles = torch.zeros(2, 16, 64, requires_grad=True)
    biases = {
        "none": None,
        "extras": lw.LevelBias(positions, positions, slope),
        "table": table,
        "gathered": table,
        "masked": lw.LevelBias(positions, positions, slope),
        "level": lw.LevelBias(positions, positions, slope),
        "log level": lw.LevelBias(positions, positions, slope, "log1p_square"),
        "line": lw.LineBias(curve, torch.ones(1, length), torch.arange(32.0), lines, lines),
        "profile": lw.QueryDistanceBias(rows, profiles, at, at),
        "profile of keys": lw.QueryDistanceBias(rows, profiles, at, at, side="key", beyond="zero"),
        "table and level": lw.SumBias((table, lw.LevelBias(positions, positions, slope))),
    }
    return checked_call(q, k, v, layout=layout, bias=biases[kind], **extras)


KINDS = (
    *("none", "few queries", "extras", "table", "gathered", "level", "masked", "log level", "line", "profile"),
    *("profile of keys", "table and level"),
)


def needs(kind: str, capability: tuple[int, int], **options: Any) -> Iterator[Needs]:
    """Of every kernel that a call of a kind launches."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    # A call may launch a kernel twice.
    launches = {
        f"{launch[0].__name__} {launch[2]}": launch for launch in launches_of(call_of(kind, **options), capability)
    }
    for kernel, args, named in launches.values():
        yield needs_of(compiled(kernel, args, dict(named), target), kernel.__name__)


if __name__ == "__main__":
    chosen = [kind for kind in KINDS if kind in sys.argv] or KINDS
    for number in [int(word) for word in sys.argv[1:] if word.isdigit()] or [80]:
        for kind in chosen:
            for own in needs(kind, divmod(number, 10)):
                print(f"sm_{number} {kind:16}", own, flush=True)
