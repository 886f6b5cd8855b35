"""Two jobs timed in turn, round by round, and what the paired ratios say. Never do two jobs run at once."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from job import Case

FILL = 0.03
"""Seconds that one number is timed for, at least: as many calls as fill them."""

CONFIDENCE = 0.95


class WorkerError(RuntimeError):
    """A worker that ended, e.g. by a segmentation fault."""


class Worker:
    """A process that runs the jobs of one source tree; see worker.py."""

    def __init__(self, source: Path) -> None:
        self.source = source.resolve()
        self._start()

    def _start(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        path = os.pathsep.join(filter(None, [str(self.source), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def greet(self) -> None:
        """Wait until the process is ready, and see that it has the right source."""
        hello = self._reply()
        if Path(hello["source"]) != self.source:
            raise WorkerError(f"expected lengthwise from {self.source}, got it from {hello['source']}")
        self.arguments: list[str] = hello["arguments"]

    def ask(self, **command: object) -> dict:
        """Send a command and wait for its answer; after a crash there is a new process without jobs."""
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            return self._reply()
        except (BrokenPipeError, WorkerError):
            code = self.process.wait()
            self._start()
            self.greet()
            raise WorkerError(f"the process ended with code {code}") from None

    def _reply(self) -> dict:
        reply = self.process.stdout.readline()
        if not reply:
            raise WorkerError(f"the process ended with code {self.process.wait()}")
        return json.loads(reply)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.process.terminate()
        self.process.communicate()


@contextmanager
def workers(*sources: Path) -> Iterator[list[Worker]]:
    """A worker for each source tree, ended afterwards."""
    running = [Worker(source) for source in sources]
    try:
        for worker in running:
            worker.greet()
        yield running
    finally:
        for worker in running:
            worker.close()


@dataclass(frozen=True)
class Entry:
    """One side of a comparison: a case in a worker."""

    name: str
    worker: Worker
    case: Case

    def ask(self, **command: object) -> dict:
        """Ask the worker about this job."""
        try:
            return self.worker.ask(job=self.name, **command)
        except WorkerError as error:
            raise WorkerError(f"{self.name}: {error}") from None


def compare(ours: Entry, other: Entry, rounds: int, *, same: bool) -> dict[str, object]:
    """Check both, then time them in turn, the order changing every round; a row with the ratio ours / other.

    With `same` both must also give the same numbers.
    """
    entries = (ours, other)
    try:
        for entry in entries:
            entry.worker.ask(drop=True)
        prepared = [entry.ask(prepare=asdict(entry.case)) for entry in entries]
        wrong = [f"{e.name}: {p['wrong']}" for e, p in zip(entries, prepared, strict=True) if p["wrong"]]
        if not wrong and same:
            wrong = disagreements(*(p["samples"] for p in prepared))
        if wrong:
            return {"wrong": "; ".join(wrong)}
        quickest = min(p["seconds"] for p in prepared)
        calls = max(1, math.ceil(FILL / quickest))
        times: dict[str, list[float]] = {entry.name: [] for entry in entries}
        for turn in range(rounds):
            for entry in entries if turn % 2 else reversed(entries):
                times[entry.name].append(entry.ask(time=calls, seconds=quickest)["seconds"])
    except WorkerError as error:
        return {"wrong": str(error)}
    ratios = [a / b for a, b in zip(times[ours.name], times[other.name], strict=True)]
    return {
        "rounds": rounds,
        "calls": calls,
        **{f"{name}_seconds": spread(of) for name, of in times.items()},
        "ratio": spread(ratios),
        "interval": median_interval(ratios),
    }


def disagreements(ours: dict, other: dict) -> list[str]:
    """Where two revisions, each true to its own reference, compute different things."""
    found = []
    for name in ours.keys() & other.keys():
        pairs = zip(ours[name]["values"], other[name]["values"], strict=True)
        apart = math.sqrt(sum((a - b) ** 2 for a, b in pairs))
        # These are some entries of results whose whole norms are within the tolerances.
        if not apart <= ours[name]["tolerance"] + other[name]["tolerance"]:
            found.append(f"the revisions disagree: {name} is {apart:.1e} apart")
    return sorted(found)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median(values), "quartiles": [low, high]}


def median_interval(values: list[float]) -> list[float] | None:
    """The interval of the median at 95 % by order statistics, exact for any distribution; None below 6 values.

    The k-th smallest and the k-th largest of n values enclose the median with probability 1 - 2 P(B < k), where B
    counts heads of n fair coins; k is the largest for which that is 95 % or more.
    """
    n, below, k = len(values), 0.0, 0
    while below + math.comb(n, k) / 2**n <= (1 - CONFIDENCE) / 2:
        below += math.comb(n, k) / 2**n
        k += 1
    ordered = sorted(values)
    return [ordered[k - 1], ordered[n - k]] if k else None


def against_limit(row: dict, limit: float) -> str:
    """ "over" if the interval lies wholly above a limit, "within" if the median does not, else "open"."""
    if row["interval"] is None:
        return "too few rounds"
    if row["interval"][0] > limit:
        return "over"
    return "within" if row["ratio"]["median"] <= limit else "open"


def line(case: Case, row: dict, verdict: str, names: tuple[str, str]) -> str:
    """A row as a line of a table."""
    if "wrong" in row:
        return f"{case.name:32} WRONG: {row['wrong']}"
    ours, other = (1000 * row[f"{name}_seconds"]["median"] for name in names)
    between = "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
    return f"{case.name:32}{ours:11.3f}{other:11.3f}{row['ratio']['median']:9.3f}  {between:16}  {verdict}".rstrip()


def heading(names: tuple[str, str]) -> str:
    """The head of that table."""
    return f"{'case':32}{names[0] + ' ms':>11}{names[1] + ' ms':>11}{'ratio':>9}  {'95 % interval':16}"
