"""The runs of a study, each in a process of its own: whatever ends one, the others go on, and its memory is its own."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lengthwise.study.parts import Part
from lengthwise.study.progress import Progress

log = logging.getLogger(__name__)
POLL = 1.0
TRAINED_ELSEWHERE = "another process is training it"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what it took, or why it failed."""

    seconds: float
    peak_bytes: int
    threads: int
    failure: str | None = None

    @staticmethod
    def read(path: Path) -> "Outcome | None":
        """What was written of a run that this study trained."""
        return Outcome(**json.loads(path.read_text())) if path.exists() else None


def train_parts(waiting: list[Part], *, folder: Path, jobs: int, progress: Progress) -> dict[str, Outcome]:
    """Train runs by their own commands, `jobs` at a time; how each ended. What they say is kept in logs."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(waiting)
    running: list[_Child] = []
    ended: dict[str, Outcome] = {}
    threads = max(1, torch.get_num_threads() // jobs)
    with _ended_by_signals():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    part = waiting.pop(0)
                    if part.is_being_trained:
                        ended[part.name] = Outcome(0.0, 0, 0, TRAINED_ELSEWHERE)
                    else:
                        progress.begin(f"training {part.name}")
                        running.append(_Child(part, folder, threads))
                for child in list(running):
                    if (outcome := child.outcome()) is None:
                        progress.training(child.part, child.part.steps_done)
                        continue
                    running.remove(child)
                    ended[child.part.name] = outcome
                    progress.trained(child.part)
                    if outcome.failure is not None:
                        log.warning("%s failed: %s", child.part.name, outcome.failure)
                if running:
                    time.sleep(POLL)
        finally:
            # Ctrl-C, SIGTERM, or an error here: the runs make their checkpoints and end; the next study goes on.
            for child in running:
                child.process.terminate()
            for child in running:
                child.process.wait()
    return ended


class _Child:
    """A run that trains in its own process."""

    def __init__(self, part: Part, folder: Path, threads: int) -> None:
        self.part = part
        self.words = folder / f"{part.name}.log"
        self.threads = threads
        self.began = time.monotonic()
        with self.words.open("w") as log:
            # A group of its own: a terminal's Ctrl-C is for the study, which then tells each run once. A run that hears
            # it twice ends at once, without a checkpoint.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lengthwise.cli", *part.arguments()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                process_group=0,
            )

    def outcome(self) -> Outcome | None:
        """How it ended, which is written down too; None while it runs."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        failure = None
        if self.process.returncode != 0 or not self.part.is_finished:
            said = [line for line in self.words.read_text(errors="replace").splitlines() if line.strip()]
            last = said[-1] if said else "it said nothing"
            failure = f"exit code {self.process.returncode}: {last} (see {self.words})"
        # Linux counts kibibytes, macOS bytes.
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        outcome = Outcome(time.monotonic() - self.began, peak, self.threads, failure)
        self.words.with_suffix(".json").write_text(json.dumps(asdict(outcome)) + "\n")
        return outcome


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal raise SystemExit instead of ending this process alone and leaving runs behind."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, and means it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread, where signals do not come
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
