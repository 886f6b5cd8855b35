"""The runs of a study, each trained by its own command in a process of its own, several at a time; and how far it is.

An engine says where: the local pool here, others on the machines of a cluster (ray_engine.py, slurm_engine.py), all on
the same folder. Whatever ends one run, the others continue; what is stopped continues from its checkpoint when the
study starts again, on whatever machine.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tqdm import tqdm

from lengthwise.files import appears
from lengthwise.study.config import StudyConfig
from lengthwise.study.record import TRAINING, TrainingOutcome, outcome_path, write_outcome
from lengthwise.study.runs import StudyRun

log = logging.getLogger(__name__)
T = TypeVar("T")
POLL_SECONDS = 1.0
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here, since after a fork a thread that is gone may hold the lock that loading takes."""
TRAINED_ELSEWHERE = "another process is training it"


def parallel_jobs(config: StudyConfig, waiting: list[StudyRun]) -> int:
    """How many runs train at the same time: one for each core, as a small model gains little from a second."""
    if config.jobs is not None:
        return config.jobs
    device = config.training.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    # A run that starts from another cannot train beside it.
    chains = {run.config.start_from or run.config.out for run in waiting}
    return max(1, min(torch.get_num_threads(), len(chains))) if on_cpu else 1


class TrainingJob(ABC):
    """A run that an engine trains."""

    run: StudyRun

    @abstractmethod
    def outcome(self) -> TrainingOutcome | None:
        """How it ended; None while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Have it make a checkpoint and end."""

    def wait(self) -> None:  # noqa: B027, an engine whose machines end by themselves has nothing to wait for
        """Wait until it has ended, after `stop`."""


class Engine(ABC):
    """Where runs are trained."""

    jobs: int
    """How many it is given at a time."""

    @abstractmethod
    def start(self, run: StudyRun, log: Path) -> TrainingJob:
        """Begin to train a run, or to wait for a machine that does; its output goes to a log file."""

    def probe(self, function: Callable[[str], T], argument: str) -> list[T]:
        """What a function gives on the machines that runs may be trained on; none where that is this one."""
        return []

    def close(self) -> None:  # noqa: B027, the local pool holds nothing
        """Give back what it holds."""


def train_runs(
    waiting: list[StudyRun],
    *,
    out: Path,
    engine: Engine,
    progress: "StudyProgress",
    finished: Callable[[StudyRun], None] | None = None,
    measure: Callable[[StudyRun], None] | None = None,
) -> dict[str, TrainingOutcome]:
    """Train runs by their own commands, each in a process of its own; how each ended.

    Whatever ends one, the others continue; each has its memory for itself, and its output goes to a log file.
    A run that starts from another one begins when that has ended, and not if it failed.
    `finished` is called with each that ended well, while others train; an error there is logged. So is `measure`, in a
    thread and one after the other: as long as it works it has the place of a run, so that no core is used twice.
    """
    folder = out / TRAINING
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(waiting)
    for planned in waiting:
        outcome_path(out, planned).unlink(missing_ok=True)  # how an earlier try ended
    running: list[TrainingJob] = []
    measuring: list[tuple[StudyRun, Future[None]]] = []
    ended: dict[str, TrainingOutcome] = {}
    with _exit_on_signals(), ThreadPoolExecutor(max_workers=1) as measurer:
        try:
            while waiting or running or measuring:
                for measured, work in [one for one in measuring if one[1].done()]:
                    measuring.remove((measured, work))
                    progress.measuring_done(measured)
                    if (failure := work.exception()) is not None:  # it is done again when all runs have ended
                        log.warning("%s could not be measured: %s", measured.name, failure)
                places = engine.jobs - bool(measuring)
                while len(running) < places and (run := _next_run(waiting, running)) is not None:
                    waiting.remove(run)
                    start = Path(run.config.start_from or "").name
                    if run.is_being_trained:
                        ended[run.name] = TrainingOutcome(0.0, None, 0, TRAINED_ELSEWHERE)
                    elif start in ended and ended[start].failure == TRAINED_ELSEWHERE:
                        ended[run.name] = TrainingOutcome(0.0, None, 0, f"it starts from {start}: {TRAINED_ELSEWHERE}")
                    elif start in ended and ended[start].failure is not None:
                        ended[run.name] = _failed(out, run, f"it starts from {start}, which failed")
                    else:
                        progress.start(f"training {run.name}")
                        try:
                            running.append(engine.start(run, folder / f"{run.name}.log"))
                        except Exception as error:  # a queue that refuses one run may take the next
                            log.warning("%s could not be started: %s", run.name, error)
                            ended[run.name] = _failed(out, run, f"could not be started: {error}")
                for child in list(running):
                    if (outcome := child.outcome()) is None:
                        progress.set_steps(child.run, child.run.steps_done)
                        continue
                    running.remove(child)
                    outcome = _seen_here(child.run, outcome)
                    ended[child.run.name] = outcome
                    progress.training_done(child.run)
                    if outcome.failure is not None:
                        write_outcome(outcome_path(out, child.run), outcome)
                        log.warning("%s failed: %s", child.run.name, outcome.failure)
                        continue
                    if finished is not None:
                        try:
                            finished(child.run)
                        except Exception as error:  # it is done again when all runs have ended
                            log.warning("after %s no report could be written: %s", child.run.name, error)
                    if measure is not None:
                        progress.start(f"measuring {child.run.name}")
                        measuring.append((child.run, measurer.submit(measure, child.run)))
                if running or measuring:
                    time.sleep(POLL_SECONDS)
        finally:
            # Ctrl-C, SIGTERM, or an error here: the runs make their checkpoints and end; the next study continues.
            for child in running:
                try:
                    child.stop()
                except Exception as error:  # the others must be stopped too
                    log.warning("%s could not be stopped: %s", child.run.name, error)
            for child in running:
                child.wait()
            measurer.shutdown(wait=False, cancel_futures=True)  # the measurement at hand ends, and is recorded
    return ended


def _next_run(waiting: list[StudyRun], running: list[TrainingJob]) -> StudyRun | None:
    """The first that does not start from a run that is still to be trained."""
    unfinished = {run.config.out for run in (*waiting, *(job.run for job in running))}
    return next((run for run in waiting if run.config.start_from not in unfinished), None)


def _failed(out: Path, run: StudyRun, failure: str) -> TrainingOutcome:
    """The outcome of a run that no machine has trained, written to a file too."""
    outcome = TrainingOutcome(0.0, None, 0, failure)
    write_outcome(outcome_path(out, run), outcome)
    return outcome


def _seen_here(run: StudyRun, outcome: TrainingOutcome) -> TrainingOutcome:
    """The outcome that a machine tells; a failure where it finished a run on a disk that this machine does not see."""
    if outcome.failure is not None or run.becomes_finished():
        return outcome
    failure = (
        f"the machine that trained it finished it, but {run.config.out} has no final model here; the folder must be on "
        "a disk that all machines share"
    )
    return dataclasses.replace(outcome, failure=failure)


class LocalPool(Engine):
    """Processes of this machine: the default, which needs nothing else."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.threads = max(1, torch.get_num_threads() // jobs)

    def start(self, run: StudyRun, log: Path) -> TrainingJob:
        """In a process of its own."""
        return TrainingProcess(run, log, self.threads)


class ProbeAnswer(NamedTuple):
    """What a machine says of the study's folder."""

    machine: str
    token: str
    """Of this answer alone, and written beside the question: two machines may have one name."""
    has_folder: bool
    """Whether it has the folder that the study was started in, which relative paths are of."""


def check_shared(engine: Engine, out: Path) -> None:
    """An error unless all machines of an engine read and write the same folder as this one."""
    out.mkdir(parents=True, exist_ok=True)
    question = out.resolve() / f".shared-{secrets.token_hex(8)}"
    question.write_text(json.dumps({"name": question.name, "folder": str(Path.cwd())}))
    try:
        for machine, token, has_folder in engine.probe(answer_probe, str(question)):
            if not appears(question.with_name(f"{question.name}-{token}")):
                raise OSError(
                    f"the study's folder must be on a disk that all machines share, got {out}, where {machine} does "
                    "not read what is written here; give another --out"
                )
            if not has_folder:
                raise OSError(
                    f"a study must be started in a folder that all machines have, got {Path.cwd()}, which {machine} "
                    "has not; start it in another"
                )
    finally:
        for file in question.parent.glob(f"{question.name}*"):
            file.unlink()


def answer_probe(question: str) -> ProbeAnswer:
    """The answer of this machine, whose token is also written beside the question if that is here."""
    machine, token = socket.gethostname(), secrets.token_hex(8)
    path, has_folder = Path(question), False
    if appears(path) and (content := json.loads(path.read_text()))["name"] == path.name:
        has_folder = Path(content["folder"]).is_dir()
        path.with_name(f"{path.name}-{token}").write_text(machine)
    return ProbeAnswer(machine, token, has_folder)


def train_to_end(run: StudyRun, log: Path, folder: Path, threads: int, *, hides_gpus: bool = False) -> TrainingOutcome:
    """Train a run on this machine, for engines that call it there; paths are those of `folder`."""
    with contextlib.chdir(folder):
        process = TrainingProcess(run, log, threads, bound=True, hides_gpus=hides_gpus)
        try:
            # submitit ignores SIGTERM, by which Slurm says that a job was cancelled.
            with _exit_on_signals():
                while (outcome := process.outcome()) is None:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            # The engine takes the machine away: time for a checkpoint.
            process.stop()
            process.wait()
            raise
        return outcome


class TrainingProcess(TrainingJob):
    """A run that trains in its own process on this machine; `bound` ends with the process that started it."""

    def __init__(
        self, run: StudyRun, log: Path, threads: int, *, bound: bool = False, hides_gpus: bool = False
    ) -> None:
        self.run = run
        self.log = log
        self.threads = threads
        self.began = time.monotonic()
        self.peak: int | None = None
        variables = {"OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {})
        with self.log.open("a") as output:  # of another study, too, that has the same run
            # A group of its own: a terminal's Ctrl-C is for the study, which then signals each run once. A run that
            # gets it twice ends at once, without a checkpoint.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lengthwise.cli", *run.arguments()],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                process_group=0,
                preexec_fn=_end_with_parent if bound and sys.platform == "linux" else None,
            )

    def stop(self) -> None:
        """By a signal, after which training makes a checkpoint."""
        self.process.terminate()

    def wait(self) -> None:
        """Until it is gone."""
        self.process.wait()

    def outcome(self) -> TrainingOutcome | None:
        """How it ended, written to a file too; None while it runs."""
        self.peak = peak_of(self.process.pid) or self.peak
        if self.process.poll() is None:
            return None
        failure = None
        if self.run.is_being_trained:
            failure = TRAINED_ELSEWHERE
        elif not self.run.is_finished:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            last = lines[-1] if lines else "it printed nothing"
            failure = f"exit code {self.process.returncode}: {last} (see {self.log})"
        outcome = TrainingOutcome(time.monotonic() - self.began, self.peak, self.threads, failure)
        write_outcome(self.log.with_suffix(".json"), outcome)
        return outcome


def peak_of(pid: int) -> int | None:
    """The most memory that a process has had so far, in bytes; None once it has ended, and where Linux does not say.

    Not ru_maxrss, which a process inherits from the one that started it: a study that measures has more than its runs.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _end_with_parent() -> None:
    """A worker that is killed must not leave a run behind that holds its folder: Linux then kills the run too."""
    assert LIBC is not None
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal raise SystemExit instead of ending this process alone and leaving runs behind."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread, which is the only one that receives signals
        pass
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StudyProgress:
    """One bar over the whole study with the time left, or a line for each stage where there is no terminal.

    Everything counts in steps of training. A measurement counts as the forward passes it needs, a third of a step for
    as many tokens.
    """

    def __init__(self, runs: list[StudyRun], *, measured_tokens: int = 0) -> None:
        self.steps = {run.name: run.resolved.steps for run in runs}
        self.measuring_steps = measured_tokens // (3 * runs[0].resolved.batch_tokens)
        self.done = {run.name: run.steps_done for run in runs}
        self.total = sum(self.steps.values()) + self.measuring_steps * len(runs)
        self.first = sum(self.done.values())
        self.began = time.monotonic()
        self.bar = tqdm(
            total=self.total, initial=self.first, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05
        )

    def __enter__(self) -> "StudyProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def start(self, stage: str) -> None:
        """Show the stage that begins now."""
        self.bar.set_description(stage)
        if self.bar.disable:
            now = sum(self.done.values())
            pace = (now - self.first) / (time.monotonic() - self.began + 1e-9)
            left = f", about {(self.total - now) / pace / 60:.0f} min left" if pace > 1e-3 else ""
            log.info("%s (%d %% done%s)", stage, 100 * now // max(1, self.total), left)

    def set_steps(self, run: StudyRun, steps: int) -> None:
        """The steps that a run has done."""
        self.done[run.name] = steps
        more = sum(self.done.values()) - self.bar.n
        if not self.bar.disable and more > 0:
            self.bar.update(more)

    def recorded(self, run: StudyRun) -> None:
        """A run was measured before this study began: it takes no time."""
        self.measuring_done(run)
        self.first = sum(self.done.values())

    def training_done(self, run: StudyRun) -> None:
        """The training of a run ended, well or not."""
        self.set_steps(run, self.steps[run.name])

    def measuring_done(self, run: StudyRun) -> None:
        """The measurement of a run ended, well or not."""
        self.set_steps(run, self.steps[run.name] + self.measuring_steps)
