"""One run of a study in a process of its own: whatever ends it, the study goes on, and its memory is its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lengthwise.runs import Run
from lengthwise.study.parts import Part

POLL = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what it took, or why it failed."""

    seconds: float
    peak_bytes: int
    failure: str | None = None

    @staticmethod
    def read(path: Path) -> "Outcome | None":
        """What was written of a run that this study trained."""
        return Outcome(**json.loads(path.read_text())) if path.exists() else None


def train_part(part: Part, *, folder: Path, tell: Callable[[int], None]) -> Outcome:
    """Train one run by its own command; `tell` hears the steps done so far. Its words are kept in a log."""
    folder.mkdir(parents=True, exist_ok=True)
    words = folder / f"{part.name}.log"
    began = time.monotonic()
    with words.open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "lengthwise.cli", *part.arguments()], stdout=log, stderr=subprocess.STDOUT
        )
        with _ended_by_sigterm():
            try:
                status, peak = _waited(child, lambda: tell(steps_done(part)))
            except BaseException:
                # Ctrl-C, SIGTERM, or an error here: the run makes its checkpoint and ends; the next study goes on.
                child.terminate()
                child.wait()
                raise
    failure = None
    if status != 0 or not part.is_finished:
        said = [line for line in words.read_text(errors="replace").splitlines() if line.strip()]
        failure = f"exit code {status}: {said[-1] if said else 'it said nothing'} (see {words})"
    outcome = Outcome(time.monotonic() - began, peak, failure)
    (folder / f"{part.name}.json").write_text(json.dumps(asdict(outcome)) + "\n")
    return outcome


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit here instead of ending this process alone and leaving the child behind."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def steps_done(part: Part) -> int:
    """How far a run has come."""
    run: Run | None = part.run
    found = run.metrics if run is not None else []
    return int(found[-1]["step"]) if found else 0


def _waited(child: subprocess.Popen[bytes], tell: Callable[[], None]) -> tuple[int, int]:
    """The exit code and the peak memory of a child, telling of it while it runs."""
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            # Linux counts kibibytes, macOS bytes.
            return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        tell()
        time.sleep(POLL)
