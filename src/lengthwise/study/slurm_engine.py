"""Runs of a study as jobs of Slurm, through submitit.

A job that is preempted, or whose time is up, is queued again and goes on from its checkpoint, and so is one whose
machine was lost. `--slurm '{"cluster": "local"}'` runs jobs as processes of this machine, to try it.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import submitit

from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import Engine, T, TrainingJob, train_to_end
from lengthwise.study.record import TrainingOutcome
from lengthwise.study.runs import StudyRun

log = logging.getLogger(__name__)
MINUTES = 24 * 60
"""Of a job, unless --slurm says other `timeout_min`."""


class TrainingTask:
    """A run as a callable that Slurm can interrupt."""

    def __init__(self, run: StudyRun, log: Path, folder: Path, threads: int) -> None:
        self.arguments = run, log, folder, threads

    def __call__(self) -> TrainingOutcome:
        """Train it, to its end or to the next interruption."""
        return train_to_end(*self.arguments)

    def checkpoint(self) -> Any:
        """What is queued in its place: the same, since a run goes on from its own checkpoint."""
        return submitit.helpers.DelayedSubmission(TrainingTask(*self.arguments))


class SlurmEngine(Engine):
    """A job for each run."""

    def __init__(self, config: StudyConfig, *, jobs: int) -> None:
        self.jobs, self.cpus, self.retries = jobs, config.cpus or 1, config.retries
        self.folder = Path.cwd()
        options = dict(config.slurm)
        cluster = options.pop("cluster", "slurm")
        if cluster == "slurm" and shutil.which("srun") is None:
            raise OSError("--engine slurm must be started where Slurm is, got a machine without srun; or use local")
        self.executor = submitit.AutoExecutor(
            folder=Path(config.out).resolve() / "slurm", cluster=cluster, slurm_max_num_timeout=config.retries
        )
        gpus = {} if config.gpus is None else {"gpus_per_node": int(config.gpus)}
        own = {"timeout_min": MINUTES, "name": "lengthwise", "cpus_per_task": self.cpus}
        self.executor.update_parameters(**(own | gpus | options))

    def start(self, run: StudyRun, log: Path) -> TrainingJob:
        """Queue it."""
        return SlurmJob(run, self, TrainingTask(run, log, self.folder, self.cpus))

    def probe(self, function: Any, argument: str) -> list[T]:
        """On the machine that the queue gives."""
        log.info("waiting for Slurm to start a job, which tells whether its machine shares the study's folder")
        return [self.executor.submit(function, argument).result()]


class SlurmJob(TrainingJob):
    """A run as a job."""

    def __init__(self, run: StudyRun, engine: SlurmEngine, task: TrainingTask) -> None:
        self.run, self.engine, self.task, self.left = run, engine, task, engine.retries
        self.job: Any = engine.executor.submit(task)

    def outcome(self) -> TrainingOutcome | None:
        """What the job gave; one that was lost is queued again, a few times."""
        if not self.job.done():
            return None
        try:
            outcome: TrainingOutcome = self.job.result()
        except Exception as error:  # whatever submitit raises: the job gave no result
            if self.left == 0:
                lines = str(error).strip().splitlines()
                return TrainingOutcome(0.0, None, 0, f"its job was lost: {lines[0] if lines else type(error).__name__}")
            self.left -= 1
            try:
                self.job = self.engine.executor.submit(self.task)
            except Exception as refusal:  # asked again next time, as long as retries are left
                log.warning("%s could not be queued again: %s", self.run.name, refusal)
            return None
        return outcome

    def stop(self) -> None:
        """Take it from the queue, or interrupt it."""
        self.job.cancel()
