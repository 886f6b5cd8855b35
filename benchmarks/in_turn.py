"""Rivals in one process, in turn, round by round; the ratio of ours to the best of the others, with its interval."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from certificate import certificate
from paired import against_limit, median_interval, spread

RESULTS = Path(__file__).parent / "results"
Job = Callable[[], object]


def ratio_to_best(ours: Job, others: dict[str, Job], rounds: int, limit: float) -> dict[str, object]:
    """Time all of them in turn, the order changing every round; ours over the one with the smallest median."""
    jobs = {"ours": ours, **others}
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds):
        for name in jobs if turn % 2 else reversed(jobs):
            start = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - start)
    best = min(others, key=lambda name: median(times[name]))
    ratios = [a / b for a, b in zip(times["ours"], times[best], strict=True)]
    row: dict[str, object] = {
        "best": best,
        "rounds": rounds,
        "seconds": {name: spread(of) for name, of in times.items()},
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


def write(name: str, rows: list[dict[str, object]]) -> None:
    """One JSON line a case, with its birth certificate, printed and kept in benchmarks/results."""
    born = certificate(f"python benchmarks/{name}.py " + " ".join(sys.argv[1:]))
    lines = [json.dumps(row | {"threads": torch.get_num_threads(), "born": born}) for row in rows]
    for row in rows:
        ratio = row["ratio"]["median"] if isinstance(row["ratio"], dict) else row["ratio"]
        print(f"{row['case']:28} ratio {ratio:.3f}  limit {row['limit']}  {row['verdict']}")
    what = str(rows[0]["what"])
    (RESULTS / f"{name}-{what}.jsonl").write_text("\n".join(lines) + "\n")
