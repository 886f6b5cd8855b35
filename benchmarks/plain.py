"""What attention costs beside our own plain call, `attend(q, k, v)`, in one process in turn; and memory by length.

A sink, a softcap or a logit scale in every mode; every encoding forward and backward. Where a limit is asked it is
shown with "within", "over" (the whole 95 % interval above it) or "open".
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from base import BIASED, WITHOUT_BIAS
from job import EXTRAS, Case
from paired import Entry, Worker, WorkerError, against_limit, compare, heading, line, workers

ROOT = Path(__file__).parents[1]
NAMES = ("ours", "plain")
LENGTHS = (1024, 4096)
MEMORY_LENGTHS = (1024, 2048, 4096)
LIMITS = {"sink": 1.03, "softcap": 1.03, "logit_scale": 1.03, "k-cable": 1.4, "cope": 4.0, "dape": 4.0, "dapev2": 7.0}
LIMITS |= {"inkling": 1.6}
AT_EVERY_LENGTH = ("inkling",)
LINEAR = 1.25
"""The power of the length up to which memory counts as linear; 2 is quadratic."""


def cases(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    """What is timed, and the encodings whose memory is measured as mode "memory" at the first length."""
    for length in lengths:
        for mode in ("forward", "train", "decode-ready"):
            yield from (Case("plain", mode, length, extra) for extra in EXTRAS)
    yield from (Case(encoding, "train", lengths[0]) for encoding in (*WITHOUT_BIAS, *BIASED) if encoding != "plain")
    yield from (Case(encoding, "train", length) for encoding in AT_EVERY_LENGTH for length in lengths[1:])
    yield from (Case(encoding, "memory", lengths[0]) for encoding in LIMITS if encoding not in EXTRAS)


def measure(chosen: list[Case], rounds: int) -> Iterator[dict[str, object]]:
    """A row for each case; a line of the table is printed with it."""
    print(heading(NAMES), flush=True)
    with workers(ROOT / "src") as (worker,):
        for case in chosen:
            if case.extra and case.extra not in worker.arguments:
                print(f"{case.name:32} left out: attend has no {case.extra} here", flush=True)
                continue
            if case.mode == "memory":
                row = memory(case, worker)
                print(memory_line(case, row), flush=True)
            else:
                row = timed(case, worker, rounds)
                limit = f" {row['limit']}" if row.get("limit") and "wrong" not in row else ""
                print(line(case, row, row["verdict"] + limit, NAMES), flush=True)
            yield asdict(case) | row


def timed(case: Case, worker: Worker, rounds: int) -> dict[str, object]:
    """The case against the plain call of its mode and length."""
    plain = Case("plain", case.mode, case.length)
    row = compare(Entry("ours", worker, case), Entry("plain", worker, plain), rounds, same=False)
    limit = LIMITS.get(case.extra or case.encoding)
    verdict = "wrong" if "wrong" in row else "" if limit is None else against_limit(row, limit)
    return row | {"limit": limit, "verdict": verdict}


def memory(case: Case, worker: Worker) -> dict[str, object]:
    """Peaks of forward and backward at growing lengths, and the power of the length that they grow with."""
    lengths = [case.length * length // MEMORY_LENGTHS[0] for length in MEMORY_LENGTHS]
    peaks: dict[str, list[int | None]] = {"torch": [], "resident": []}
    try:
        for length in lengths:
            worker.ask(drop=True)
            entry = Entry("ours", worker, replace(case, mode="train", length=length))
            if wrong := entry.ask(prepare=asdict(entry.case))["wrong"]:
                return {"wrong": wrong, "verdict": "wrong"}
            for account, peak in entry.ask(memory=True).items():
                peaks[account].append(peak)
    except WorkerError as error:
        return {"wrong": str(error), "verdict": "wrong"}
    stretch = math.log(lengths[-1] / lengths[0])
    powers = {name: math.log(of[-1] / of[0]) / stretch for name, of in peaks.items() if all(of)}
    verdict = "linear" if max(powers.values()) <= LINEAR else "not linear"
    return {"lengths": lengths, "peak_bytes": peaks, "powers": powers, "verdict": verdict}


def memory_line(case: Case, row: dict) -> str:
    """Peaks in MB by torch's account, then resident."""
    if "wrong" in row:
        return f"{case.name:32} WRONG: {row['wrong']}"
    accounts = [
        f"{name} {', '.join(f'{peak / 1e6:.0f}' for peak in row['peak_bytes'][name])} MB, power {power:.2f}"
        for name, power in row["powers"].items()
    ]
    return f"{case.name:32} {'; '.join(accounts)}: {row['verdict']}"
