"""Rivals in one process, in turn, round by round; the ratio of ours to the best of the others, with its interval.

A rival that after a few rounds takes a tenth longer than the best of the others is left out of the rest.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import torch
from certificate import certificate
from paired import against_limit, median_interval, spread

RESULTS = Path(__file__).parent / "results"
Job = Callable[[], object]
FIRST_ROUNDS, MUCH = 4, 1.1


def ratio_to_best(ours: Job, others: dict[str, Job], rounds: int, limit: float) -> dict[str, object]:
    """Time all of them in turn, the order changing every round; ours over the one with the smallest median."""
    jobs = {"ours": ours, **others}
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds):
        if turn == FIRST_ROUNDS:
            middle = {name: median(times[name]) for name in others}
            slow = [name for name in others if middle[name] > MUCH * min(middle.values())]
            jobs = {name: job for name, job in jobs.items() if name not in slow}
        for name in jobs if turn % 2 else reversed(jobs):
            start = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - start)
    best = min((name for name in jobs if name != "ours"), key=lambda name: median(times[name]))
    ratios = [a / b for a, b in zip(times["ours"], times[best], strict=True)]
    row: dict[str, object] = {
        "best": best,
        "rounds": rounds,
        "seconds": {name: spread(of) | {"rounds": len(of)} for name, of in times.items()},
        "ratio": spread(ratios),
        "interval": median_interval(ratios),
        "limit": limit,
    }
    return row | {"verdict": against_limit(row, limit)}


def check_close(ours: torch.Tensor, expected: torch.Tensor, label: str, of_largest: float = 1e-5) -> None:
    """An error unless rivals compute the same."""
    off = float((ours - expected).abs().max() / expected.abs().max())
    if not off <= of_largest:
        raise AssertionError(f"{label}: the rivals differ by {off:.1e} of the largest, more than {of_largest:.0e}")


def write(name: str, rows: Iterable[dict[str, object]], *, store: bool = True) -> None:
    """One JSON line a case, with its birth certificate, in benchmarks/results as soon as it is measured; and in print.

    Lines of other cases that were measured before stay.
    """
    born = certificate(f"python benchmarks/{name}.py " + " ".join(sys.argv[1:]))
    for row in rows:
        print(in_words(row), flush=True)
        if not store:
            continue
        path = RESULTS / f"{name}-{row['what']}.jsonl"
        before = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in before if json.loads(line)["case"] != row["case"]]
        lines.append(json.dumps(row | {"threads": torch.get_num_threads(), "born": born}))
        path.write_text("\n".join(lines) + "\n")


def in_words(row: dict) -> str:
    """A case with its ratio, quartiles and interval, and what was asked of it."""
    ratio = row["ratio"]
    if not isinstance(ratio, dict):
        return f"{row['case']:28} {ratio:.3f}  asked {row['limit']}  {row['verdict']}"
    between = "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
    quartiles = "{:.3f} to {:.3f}".format(*ratio["quartiles"])
    words = f"{ratio['median']:.3f}  quartiles {quartiles}  95 % {between}  to {row['best']}"
    return f"{row['case']:28} {words}  asked {row['limit']}  {row['verdict']}"
