"""A proof on one device, as a block of Markdown: laws for every backend and kind of call, and times beside SDPA.

    lengthwise info --prove --device cuda

The block ends with a checksum over its lines, so that a report that was pasted is seen to be whole. Reports of cards
are kept in docs/gpu/.
"""

import gc
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from statistics import quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.attention import BACKENDS, checked_call, choose
from lengthwise.attention.backend import Refusal, total_bytes
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.info import CALLS
from lengthwise.attention.triton.self_test import driver, triton_version
from lengthwise.bias import Bias, DistanceBias, LevelBias
from lengthwise.errors import UserError
from lengthwise.origin import processor_name
from lengthwise.token_layout import layout

ALLOWED = {torch.float32: 2.0**-14, torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
"""Errors relative to a tensor's norm that no fault hides in; the report shows the errors themselves."""

SIGN = "<!-- checksum "


@dataclass(frozen=True)
class Extent:
    """How much is proved and measured."""

    lengths: tuple[int, ...]
    """Of the calls that are held to float64, and under `widths` of their heads."""
    widths: tuple[int, ...]
    repeats: int
    """How often the same bits must come."""
    timed: tuple[int, ...]
    """Lengths that are timed."""
    heads: int
    dim: int
    seconds: float
    """After so long a case is timed no more, however few rounds it had."""


FULL = Extent((1, 63, 131, 1023, 4095), (64, 128), 20, (1024, 4096, 16384), 12, 64, 5.0)
QUICK = Extent((5, 37), (16,), 3, (64, 128), 2, 16, 0.02)
ROUNDS = 20


def report(device: str = "cpu", quick: bool = False) -> str:
    """The block of Markdown, with its checksum."""
    where, extent = checked_device(device), QUICK if quick else FULL
    lines = [f"## {_card(where)}", "", *_facts(where, quick), "", *_laws(where, extent), "", *_times(where, extent)]
    text = "\n".join(lines)
    return f"{text}\n\n{SIGN}{checksum(text)} -->"


def checksum(text: str) -> str:
    """Of a report's lines, whatever white space they end with."""
    lines = [line.rstrip() for line in text.split(SIGN)[0].strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def is_whole(text: str) -> bool:
    """Whether a report is as it was printed."""
    return SIGN in text and text.split(SIGN)[1].split()[0] == checksum(text)


def checked_device(device: str) -> torch.device:
    """The device, or an error that says what there is."""
    known = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    kind = device.partition(":")[0]
    if kind == "mps":
        raise UserError("a proof compares with float64, which MPS does not have, got --device mps")
    if kind == "cuda" and "cuda" not in known:
        raise UserError("CUDA is not available here: torch finds no NVIDIA GPU, or is a build without CUDA")
    if kind not in known:
        raise UserError(f"--device must be {' or '.join(map(repr, known))}, got {device!r}")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"--device must be a device of torch, such as 'cuda:0', got {device!r}") from error
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device must be one of {torch.cuda.device_count()} GPUs, counted from 0, got {device!r}")
    return where


def _card(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else f"{processor_name()} ({where.type})"


def _facts(where: torch.device, quick: bool) -> Iterator[str]:
    from lengthwise import __version__

    facts = {
        "Lengthwise": __version__,
        "torch": str(torch.__version__),
        "Triton": triton_version(),
        "Python": platform.python_version(),
        "system": platform.system(),
        "date": str(date.today()),
        "extent": "quick" if quick else "full",
    }
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        major, minor = torch.cuda.get_device_capability(where)
        facts |= {
            "driver": driver(),
            "CUDA": str(torch.version.cuda),
            "compute capability": f"{major}.{minor}",
            "memory": f"{properties.total_memory / 1e9:.0f} GB",
            "multiprocessors": str(properties.multi_processor_count),
        }
    else:
        facts["threads"] = str(torch.get_num_threads())
    yield "| | |"
    yield "|---|---|"
    for name, fact in facts.items():
        yield f"| {name} | {fact} |"


# Laws.

Make = Callable[[int, int], AttentionCall]


def _laws(where: torch.device, extent: Extent) -> Iterator[str]:
    """The largest error of each backend and kind against float64, output and gradients; and equal bits."""
    yield f"Largest error against float64 on this device, relative, output and gradients, {_listed(extent.lengths)}"
    precisions = " / ".join(str(dtype).removeprefix("torch.") for dtype in ALLOWED)
    yield f"tokens, heads of {_listed(extent.widths)}, {precisions};"
    yield f"`bits` marks results that differ among {extent.repeats} runs, `-` a refusal."
    yield ""
    yield f"| | {' | '.join(BACKENDS)} | auto takes |"
    yield "|---|" + "---|" * (len(BACKENDS) + 1)
    reasons: dict[str, dict[str, None]] = {name: {} for name in BACKENDS}
    for kind, make in CALLS.items():
        cells = []
        for name in BACKENDS:
            marks = [_verdict(name, make, where, dtype, extent, reasons[name]) for dtype in ALLOWED]
            cells.append("-" if set(marks) == {"-"} else " / ".join(marks))
        yield f"| {kind} | {' | '.join(cells)} | {_taken(make, where, extent)} |"
    yield ""
    for name, own in reasons.items():
        for reason in own:
            yield f"- {name}: {reason}"


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(filter(None, [", ".join(f"{n:,}" for n in sizes[:-1]), f"{sizes[-1]:,}"]))


def _taken(make: Make, where: torch.device, extent: Extent) -> str:
    return choose(_call_on(make, where, torch.float32, extent.lengths[-1], extent.widths[0]))[0]


def _call_on(make: Make, where: torch.device, dtype: torch.dtype, length: int, width: int) -> AttentionCall:
    """A call on a device, with queries, keys and values of a precision."""
    with torch.device(where):
        call = make(length, width)
    return replace(call, **{name: getattr(call, name).detach().to(dtype).requires_grad_() for name in "qkv"})


def _verdict(
    backend: str,
    make: Make,
    where: torch.device,
    dtype: torch.dtype,
    extent: Extent,
    reasons: dict[str, None],
) -> str:
    """The largest error, or what is wrong."""
    worst = 0.0
    for length, width in product(extent.lengths, extent.widths):
        try:
            call = _call_on(make, where, dtype, length, width)
            plan = BACKENDS[backend].plan(call)
            if isinstance(plan, Refusal):
                reasons |= dict.fromkeys(plan.reasons)
                return "-"
            ours = _results(backend, call)
            exact = _results("reference", _in_float64(call))
            repeats = extent.repeats if length == extent.lengths[len(extent.lengths) // 2] else 1
            same = all(_same_bits(ours, _results(backend, call)) for _ in range(repeats - 1))
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            reasons[_in_a_line(error)] = None
            return "FAILED"
        for name, truth in exact.items():
            size = float(truth.norm())
            off = float((ours[name].double() - truth).norm())
            if not math.isfinite(off):
                return "NOT FINITE"
            worst = max(worst, off / size if size else off)
        if not same:
            return "bits"
    return f"{worst:.0e}" if worst <= ALLOWED[dtype] else f"WRONG {worst:.0e}"


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".replace("|", "/")


def _results(backend: str, call: AttentionCall) -> dict[str, Tensor]:
    """The output, the log-sum-exp where it is asked for, and all gradients, by name."""
    leaves = {name: x.requires_grad_(call.tensors()[name].requires_grad) for name, x in _detached(call).items()}
    call, module = call.with_tensors(leaves), BACKENDS[backend]
    out, lse = module.run(call, module.plan(call))
    outputs = {"out": out} | ({"lse": lse} if call.return_lse else {})
    learned = {name: x for name, x in leaves.items() if x.requires_grad}
    # No power of the output: what adds to a whole row would have a gradient that cancels.
    total = sum((x * _waves(x)).sum() for x in outputs.values())
    gradients = torch.autograd.grad(total, list(learned.values()), allow_unused=True)
    return {name: x.detach() for name, x in outputs.items()} | {
        name: x for name, x in zip(learned, gradients, strict=True) if x is not None
    }


def _detached(call: AttentionCall) -> dict[str, Tensor]:
    """What a gradient may flow to; positions stay the layout's own, of which a plan knows more than of others."""
    return {name: x.detach() for name, x in call.tensors().items() if x.is_floating_point()}


def _waves(x: Tensor) -> Tensor:
    """Numbers that every precision and device has alike."""
    return (torch.arange(x.numel(), device=x.device) % 7 - 2).view(x.shape).to(x.dtype)


def _in_float64(call: AttentionCall) -> AttentionCall:
    own = {name: x.double() for name, x in _detached(call).items()}
    return call.with_tensors({name: x.requires_grad_(call.tensors()[name].requires_grad) for name, x in own.items()})


def _same_bits(ours: dict[str, Tensor], again: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, again[name]) for name, x in ours.items())


# Times.

Step = Callable[[], Any]


def _times(where: torch.device, extent: Extent) -> Iterator[str]:
    """Milliseconds, forward alone and with backward, beside SDPA without a bias and with one that is filled in."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    yield f"One sequence, {extent.heads} heads of {extent.dim}, {str(dtype).removeprefix('torch.')}, causal; median and"
    yield "quartiles in ms, peak of memory above what was there before. The bias is a learned table, or levels with"
    yield "ALiBi's slopes, whose far keys are skipped."
    yield ""
    yield "| tokens | bias | backend | forward | with backward | rounds | peak MB | skipped |"
    yield "|---|---|---|---|---|---|---|---|"
    names = [name for name in BACKENDS if name not in ("sdpa", "reference")]
    for length in extent.timed:
        rivals = {("none", "sdpa"): lambda call: F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True)}
        rivals |= {(bias, "sdpa, filled in"): _filled_in for bias in BIASES}
        for (bias, name), attend in rivals.items():
            yield from _timed(where, extent, dtype, length, bias, name, attend)
        for bias in BIASES:
            for name in names:
                yield from _timed(where, extent, dtype, length, bias, name, _by(name))


def _by(name: str) -> Callable[[AttentionCall], Any]:
    def attend(call: AttentionCall) -> Any:
        plan = BACKENDS[name].plan(call)
        if isinstance(plan, Refusal):
            raise NotImplementedError(plan.reasons[0])
        return BACKENDS[name].run(call, plan)[0]

    return attend


def _table(heads: int, positions: Tensor) -> Bias:
    steps = torch.arange(positions.shape[1], device=positions.device)
    table = -steps.float().log1p().expand(heads, -1) * torch.linspace(0.1, 2, heads, device=positions.device)[:, None]
    return DistanceBias(table.contiguous().requires_grad_(), positions, positions)


def _levels(heads: int, positions: Tensor) -> Bias:
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=positions.device) / heads)
    level = positions[None].double()
    return LevelBias(level, level, slopes.view(1, heads, 1).requires_grad_())


BIASES: dict[str, Callable[[int, Tensor], Bias]] = {"table": _table, "levels": _levels}


def _filled_in(call: AttentionCall) -> Tensor:
    """As most models have it: the bias made anew in every step, with the mask in it."""
    assert call.bias is not None
    need = 4 * call.batch * call.heads * call.queries * call.keys * 4
    have = total_bytes()
    if call.q.device.type == "cpu" and have is not None and need > have:
        raise NotImplementedError("it does not fit into memory")
    hidden = ~call.visibility.mask()
    mask = call.bias.dense().masked_fill(hidden, -torch.inf).to(call.dtype)
    return F.scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=mask.expand(call.batch, -1, -1, -1))


def _timed(
    where: torch.device,
    extent: Extent,
    dtype: torch.dtype,
    length: int,
    bias: str,
    name: str,
    attend: Callable[[AttentionCall], Any],
) -> Iterator[str]:
    """One row of the table; none for what the backend refuses."""
    size = (1, extent.heads, length, extent.dim)
    q, k, v = (torch.randn(size, generator=torch.Generator().manual_seed(n)).to(where, dtype) for n in range(3))
    placed = layout(length, device=where)
    own = BIASES[bias](extent.heads, placed.query) if bias in BIASES else None
    call = checked_call(*(x.requires_grad_() for x in (q, k, v)), layout=placed, bias=own)
    learned = [x for x in call.sources if x.requires_grad]
    idle = call.with_tensors(_detached(call))

    def forward() -> None:
        with torch.no_grad():
            attend(idle)

    def both() -> None:
        out = attend(call)
        torch.autograd.grad(out, learned, out.detach(), allow_unused=True)

    cells, peak, rounds = [], 0.0, 0
    for step in (forward, both):
        if step is forward and name == "flex" and where.type == "cpu":
            cells.append("not timed")  # it is made for GPUs, and takes seconds to compile
            continue
        try:
            times, memory = _measured(step, where, extent.seconds)
        except NotImplementedError:
            cells.append("refused")
            continue
        except torch.OutOfMemoryError:
            cells.append("out of memory")
            continue
        except Exception as error:  # a compiler or a driver: the report says so and goes on
            cells.append(f"FAILED: {_in_a_line(error)}")
            continue
        low, middle, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        cells.append(f"{middle:.3g} ({low:.3g} - {high:.3g})")
        peak, rounds = max(peak, memory), len(times)
    if rounds or any(cell.startswith("FAILED") for cell in cells):
        share = getattr(BACKENDS.get(name), "skipped_share", None)
        skipped = f"{share(idle):.0%}" if share is not None and rounds else ""
        megabytes = f"{peak / 1e6:,.0f}" if where.type == "cuda" else ""
        yield f"| {length:,} | {bias} | {name} | {' | '.join(cells)} | {rounds} | {megabytes} | {skipped} |"


def _measured(step: Step, where: torch.device, seconds: float) -> tuple[list[float], float]:
    """Milliseconds of every round after one that is not counted, and the peak of memory."""
    gc.collect()
    is_cuda = where.type == "cuda"
    before = 0
    step()
    if is_cuda:
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 or (len(times) < ROUNDS and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize(where)
        times.append(1e3 * (time.perf_counter() - start))
    return times, torch.cuda.max_memory_allocated(where) - before if is_cuda else 0.0
