"""Runs of a study as tasks of a Ray cluster: one that exists, or a local one for as long as the study lasts.

Ray gives every run its cores and GPUs, waits for machines that join later, and starts a run again whose worker died;
the run then goes on from its checkpoint, which is in the study's folder.
"""

import logging
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import Engine, T, TrainingJob, train_to_end
from lengthwise.study.record import TrainingOutcome
from lengthwise.study.runs import StudyRun

log = logging.getLogger(__name__)
PROBE_SECONDS = 600.0
"""How long a machine has to answer: a busy one takes minutes to start a worker."""


class RayEngine(Engine):
    """A task for each run."""

    def __init__(self, config: StudyConfig, *, jobs: int) -> None:
        self.jobs, self.cpus = jobs, config.cpus or 1
        self.folder = Path.cwd()
        # Ray leaves all GPUs visible to a task that reserves none: every run would take the first.
        self.hides_gpus = config.gpus is None
        if self.hides_gpus and config.training.device == "auto":
            log.info("runs are trained without GPUs: --gpus 1 gives one to each")
        self.began = not ray.is_initialized()
        if self.began:
            # A local cluster has room for as many runs as are wanted at a time, whatever the cores. It is asked for by
            # name: without one Ray joins the cluster of RAY_ADDRESS, or the last that was started here.
            local: dict[str, Any] = {"include_dashboard": False} if config.address is None else {}
            if config.address is None and config.jobs is not None:
                local["num_cpus"] = config.jobs * self.cpus
            ray.init(address=config.address or "local", log_to_driver=False, configure_logging=False, **local)
        # A worker of its own for each run.
        self.task: Any = ray.remote(
            num_cpus=self.cpus, num_gpus=config.gpus or 0, max_retries=config.retries, max_calls=1
        )(train_to_end)

    def start(self, run: StudyRun, log: Path) -> TrainingJob:
        """Wait for room, then train."""
        return RayJob(run, self.task.remote(run, log, self.folder, self.cpus, hides_gpus=self.hides_gpus))

    def probe(self, function: Any, argument: str) -> list[T]:
        """On every machine that is there now."""
        task = ray.remote(function)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        answers = [task.options(num_cpus=0, scheduling_strategy=place).remote(argument) for place in places]
        _, missing = ray.wait(answers, num_returns=len(answers), timeout=PROBE_SECONDS)
        if missing:
            raise OSError(
                f"every machine of the cluster must answer within {PROBE_SECONDS:.0f} seconds, got {len(missing)} of "
                f"{len(answers)} that did not; see `ray status`"
            )
        results: list[T] = ray.get(answers)
        return results

    def close(self) -> None:
        """End a local cluster."""
        if self.began:
            ray.shutdown()


class RayJob(TrainingJob):
    """A run as a task."""

    def __init__(self, run: StudyRun, answer: Any) -> None:
        self.run, self.answer = run, answer

    def outcome(self) -> TrainingOutcome | None:
        """What the task gave, or why it gave nothing."""
        ready, _ = ray.wait([self.answer], timeout=0)
        if not ready:
            return None
        try:
            outcome: TrainingOutcome = ray.get(self.answer)
        except ray.exceptions.RayError as error:
            # An error of the task itself is no lost worker, and is not tried again.
            reason = "its task failed" if isinstance(error, ray.exceptions.RayTaskError) else "its worker was lost"
            lines = str(error).strip().splitlines()
            return TrainingOutcome(0.0, None, 0, f"{reason}: {lines[-1] if lines else type(error).__name__}")
        return outcome

    def stop(self) -> None:
        """Interrupt the task, which has the run make a checkpoint."""
        ray.cancel(self.answer)

    def wait(self) -> None:
        """Until it has ended, one way or another."""
        ray.wait([self.answer])
