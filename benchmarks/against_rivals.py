"""Attention under every encoding against its rivals, in turn in one process: right first, with gradients, then timed.

Two loops. In the fast one each round runs torch's SDPA without a bias, our own call without one, and every encoding;
in the slow one the usual ways, which fill in the bias, and torch's SDPA. A ratio is the median over the rounds of the
ratio within a round, so that a busy machine slows both sides of it. One JSON line a case, with its certificate.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from job import DIM, HEADS, Case, Job
from memory import torch_peak
from paired import FILL, median_interval, spread
from rivals import RIVALS, check_rival, make_setup, timed_call

from lengthwise.attention import checked_call, choose, skipped_share

ROUNDS, SLOW_ROUNDS = 20, 5
EVERY = (
    *("alibi", "kerple", "kerple-power", "t5", "t5-clamped", "rope", "inkling", "cable", "cable-nw", "k-cable", "fox"),
    *("cope", "dape", "dapev2", "fire-512", "fire"),
)
"""One or more of every kind; "fire" is with L beyond the length, "dape" and "dapev2" over kerple."""

LONG = ("t5-clamped", "kerple", "alibi", "cable", "cable-nw", "fox", "fire-512", "fire")
CURVES = ("kerple", "fire-512", "alibi", "cable", "cable-nw")
"""What the figure of time against length shows."""

SHORT = ("t5-clamped", "kerple", "alibi", "cable", "cable-nw", "fox", "fire-512")
FAST: dict[str, list[tuple[str, int, tuple[str, ...]]]] = {
    "short": [("train", 1024, SHORT), ("train", 4096, SHORT), ("decode-ready", 4096, SHORT)],
    "full": [
        *(("train", length, CURVES) for length in (512, 2048, 8192)),
        *((mode, length, EVERY) for length in (1024, 4096) for mode in ("forward", "train")),
        ("train", 16384, LONG),
        *((mode, 4096, EVERY) for mode in ("decode-ready", "decode-built")),
    ],
}
SLOW = [("train", 1024, ("alibi", "kerple", "t5")), ("train", 4096, ("alibi", "kerple", "t5"))]
MEMORY_ALONE = (32768, ("alibi", "cable", "kerple", "fire-512"))
"""So long that only the memory of one call is measured."""


def measured(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of the cases that were asked for; a line is printed with each."""
    lengths = None if options.lengths is None else {int(n) for n in options.lengths.split(",")}
    only = None if options.only is None else set(options.only.split(","))
    modes = None if options.modes is None else set(options.modes.split(","))

    def wanted(mode: str, length: int, names: tuple[str, ...]) -> list[str]:
        if (lengths and length not in lengths) or (modes and mode not in modes):
            return []
        return [name for name in names if only is None or name in only]

    for mode, length, names in FAST[options.form]:
        if some := wanted(mode, length, names):
            yield from _printed(fast(mode, length, some, ROUNDS))
    if options.form == "short" or options.fast:
        return
    for mode, length, names in SLOW:
        for name in wanted(mode, length, names):
            yield from _printed(slow(mode, length, name, SLOW_ROUNDS))
    for name in wanted("train", *MEMORY_ALONE):
        yield from _printed([memory_alone(Case(name, "train", MEMORY_ALONE[0]))])


def fast(mode: str, length: int, names: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """SDPA and our own call without a bias, and encodings, all in one loop."""
    jobs = {"plain": Job(Case("plain", mode, length))}
    for name in names:
        if not (mode.startswith("decode") and name in ("rope", "cope")):  # a decoder turns one key of many
            jobs[name] = Job(Case(name, mode, length))
    for name, job in jobs.items():
        if wrong := job.check()[0]:
            raise AssertionError(f"{name}/{mode}/{length}: {wrong}")
    runs: dict[str, Callable[[], object]] = {"sdpa": sdpa(jobs["plain"])}
    runs |= {name: job.call for name, job in jobs.items()}
    peaks = {name: torch_peak(run)[0] for name, run in runs.items()}
    times = in_turn(runs, rounds)
    for name in runs:
        row: dict[str, object] = {"encoding": name, "mode": mode, "length": length, "rounds": rounds}
        row |= {"seconds": spread(times[name]), "peak_bytes": peaks[name]}
        row |= {f"to_{other}": _ratio(times[name], times[other]) for other in ("sdpa", "plain")}
        yield row | (described(jobs[name]) if name in jobs else {})


def slow(mode: str, length: int, name: str, rounds: int) -> Iterator[dict[str, object]]:
    """The usual ways to add this bias, and SDPA without one."""
    setup = make_setup(name, length, mode)
    runs = {"sdpa": timed_call(RIVALS["no bias"], setup, mode)}
    for rival, way in RIVALS.items():
        if rival != "no bias" and way.takes(setup, length, mode):
            check_rival(rival, setup)
            runs[rival] = timed_call(way, setup, mode)
    peaks = {rival: torch_peak(run)[0] for rival, run in runs.items()}
    times = in_turn(runs, rounds)
    for rival in list(runs)[1:]:
        row: dict[str, object] = {"encoding": name, "rival": rival, "mode": mode, "length": length, "rounds": rounds}
        row |= {"seconds": spread(times[rival]), "peak_bytes": peaks[rival]}
        yield row | {"to_sdpa": _ratio(times[rival], times["sdpa"]), "memory_to_sdpa": peaks[rival] / peaks["sdpa"]}


def memory_alone(case: Case) -> dict[str, object]:
    """One call, checked."""
    job = Job(case)
    if wrong := job.check()[0]:
        raise AssertionError(f"{case.name}: {wrong}")
    peak, seconds = torch_peak(job.call)
    return asdict(case) | {"rounds": 1, "seconds": {"median": seconds}, "peak_bytes": peak}


def sdpa(job: Job) -> Callable[[], object]:
    """torch's SDPA without a bias, on the inputs of a job."""

    def run() -> object:
        with torch.set_grad_enabled(job.learning):
            out = F.scaled_dot_product_attention(job.last_q, job.k, job.v, is_causal=job.rows > 1)
        return torch.autograd.grad(out, (job.last_q, job.k, job.v), job.d_out) if job.learning else out

    return run


def described(job: Job) -> dict[str, object]:
    """The backend that takes the call, and how much of the work it leaves out."""
    if job.encoding is None:
        call = checked_call(job.last_q, job.k, job.v)
    else:
        q, k, given = job.prepared()
        call = checked_call(q, k, job.v, layout=job.place, **given)
    return {"backend": choose(call)[0], "skipped_share": skipped_share(call)}


def in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, by round: all of them once a round, the first one changing."""
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = max(1, round(FILL / max(_seconds(run, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(_seconds(runs[name], calls[name]))
    return times


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, object]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return spread(ratios) | {"interval": median_interval(ratios)}


def _printed(rows: Iterator[dict[str, object]] | list[dict[str, object]]) -> Iterator[dict[str, object]]:
    for row in rows:
        name = f"{row['encoding']} {row.get('rival', '')}".strip()
        line = f"{row['mode']:13}{row['length']:6} {name:28}{1000 * row['seconds']['median']:10.3f} ms"
        for other in ("sdpa", "plain"):
            if ratio := row.get(f"to_{other}"):
                line += "   {}: {:.3f} ({:.3f} to {:.3f})".format(other, ratio["median"], *ratio["quartiles"])
        share = row.get("skipped_share")
        print(line + (f"   skipped {share:.0%}" if share else ""), flush=True)
        yield row | {"heads": HEADS, "head_dim": DIM}
