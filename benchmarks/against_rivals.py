"""Attention under every encoding against its rivals, in turn in one process: time, memory, and the error first.

A case is correct before it is timed. Rivals run round robin, so that a busy machine slows all of them; the ratio is to
SDPA with no bias, the limit of what attention can cost. One JSON line a case and rival, with its birth certificate.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from memory import torch_peak
from rivals import RIVALS, Rival, Setup

import lengthwise as lw
from lengthwise.attention import BACKENDS, choose

HEADS, DIM = 12, 64
BUDGET = {"short": 3.0, "full": 2.0}
"""Seconds that a case may take in all rounds of all rivals, beyond the first two rounds."""

LONG = 20.0
"""Seconds beyond which a run needs no warming up, and one tells enough."""

FAST = ("no bias", "lengthwise", "lengthwise, bias ready")
ONE_PER_KIND = ("alibi", "cable", "kerple", "fire")
SHORT = ("t5-clamped", "kerple", "alibi", "cable", "cable-nw", "fox", "fire")


@dataclass(frozen=True)
class Case:
    """An encoding at a length; mode is "forward", "train" (forward and backward) or "decode" (one query)."""

    encoding: str
    length: int
    mode: str
    options: str = "{}"


def cases(form: str) -> Iterator[Case]:
    """What is measured."""
    lengths = {"short": (1024, 4096), "full": (512, 1024, 2048, 4096, 8192)}[form]
    names = tuple(lw.ENCODINGS) if form == "full" else SHORT
    for length in lengths:
        for mode in ("forward", "train") if form == "full" else ("train",):
            yield from (Case(name, length, mode) for name in names)
            yield Case("fire", length, mode, '{"threshold": 65536}')
    yield from (Case(name, 4096, "decode") for name in names)
    if form == "full":
        yield from (Case(name, 16384, "train") for name in SHORT)
        yield Case("fire", 16384, "train", '{"threshold": 65536}')
        yield from (Case(name, 32768, "train") for name in ONE_PER_KIND)


def measure(case: Case, seconds: float, *, fast: bool = False) -> Iterator[dict[str, object]]:
    """One row a rival: right first, then timed in turn."""
    setup = make_setup(case)
    runs: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, object]] = {}
    for name, rival in RIVALS.items():
        if not rival.takes(setup, case.length, case.mode) or (fast and name not in FAST):
            continue
        rows[name] = {"error": checked(rival, setup, name)}
        runs[name] = timed_call(rival, setup, case.mode)
    first = {name: torch_peak(run) for name, run in runs.items()}
    times = {name: [spent] for name, (_, spent) in first.items()}
    if max(spent for _, spent in first.values()) < LONG:
        times = round_robin(runs, seconds)
    limit = times["no bias"]
    for name, row in rows.items():
        tokens = 1 if case.mode == "decode" else case.length
        row |= {
            "rival": name,
            "best": min(times[name]),
            "median": median(times[name]),
            "ratio": min(times[name]) / min(limit),
            "median_ratio": median(a / b for a, b in zip(times[name], limit, strict=True)),
            "rounds": len(limit),
            "tokens_per_second": tokens / min(times[name]),
            "peak_bytes": first[name][0],
        }
        if name == "lengthwise":
            row["backend"] = chosen = choose(setup.call())[0]
            if hasattr(BACKENDS[chosen], "skipped_share") and setup.rescore is None:
                row["skipped_share"] = BACKENDS[chosen].skipped_share(setup.call())
        yield asdict(case) | row


def make_setup(case: Case) -> Setup:
    """Ordinary inputs: unit-variance q, k, v, layer-normed tokens, the encoding at its initial weights."""
    torch.manual_seed(0)
    options = json.loads(case.options)
    encoding = lw.make(case.encoding, heads=HEADS, width=HEADS * DIM, train_length=case.length, **options)
    q, k, v = torch.randn(3, 1, HEADS, case.length, DIM)
    x = F.layer_norm(torch.randn(1, case.length, HEADS * DIM), (HEADS * DIM,))
    rows = 1 if case.mode == "decode" else case.length
    decoding = case.mode == "decode"
    with torch.no_grad():
        cached = encoding.state(x) if decoding else None
        if decoding:
            k = encoding.rotate(k, k, torch.arange(case.length), torch.arange(case.length))[1]
    q = q[:, :, -rows:].contiguous()
    return Setup(encoding, x, q, k, v, learning=case.mode == "train", cached=cached, keys_turned=decoding)


def checked(rival: Rival, setup: Setup, name: str) -> float | None:
    """The largest error of some late rows against the reference in float64; more than rounding is a fault."""
    if name == "no bias":
        return None
    rows = min(8, setup.q.shape[2])
    with torch.no_grad():
        found = rival.run(setup)[:, :, -rows:]
        exact = setup.late(rows)
    error = float((found - exact).abs().max())
    # Scores of size 10 rounded at 2 ** -24 move weights, and so outputs of size 1, by about 1e-6; sums add to it.
    if not error < 1e-4:
        raise AssertionError(f"{name} is off by {error:.1e} under {setup.encoding}: not timed")
    return error


def timed_call(rival: Rival, setup: Setup, mode: str) -> Callable[[], object]:
    """What is timed: building the bias included, gradients to everything learned in "train"."""
    run = rival.ready(setup)
    if mode != "train":

        def forward() -> object:
            with torch.no_grad():
                return run(setup)

        return forward
    d_out = torch.randn_like(setup.q)

    def train() -> object:
        return torch.autograd.grad(run(setup), setup.learned(rival.biased), d_out)

    return train


def round_robin(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Every run once a round, all of them warm by now; one round where it takes long."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for round in range(300):
        passed = time.perf_counter() - began
        if passed > seconds and (round >= 2 or passed > LONG):
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of the cases that were asked for; a line is printed with each."""
    for case in cases(options.form):
        if options.only and case.encoding not in options.only.split(","):
            continue
        if options.lengths and str(case.length) not in options.lengths.split(","):
            continue
        if options.modes and case.mode not in options.modes.split(","):
            continue
        for row in measure(case, BUDGET[options.form], fast=options.fast):
            skipped = row.get("skipped_share")
            share = "" if skipped is None else f"  skipped {skipped:.0%}"
            print(
                f"{case.mode:8}{case.length:6} {case.encoding:13}{row['rival']:22}{row['best']:9.4f} s"
                f"  ratio {row['ratio']:6.3f}  {row['peak_bytes'] / 1e6:8.1f} MB{share}",
                flush=True,
            )
            yield row
