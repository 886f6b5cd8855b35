"""Which engine trains the runs of a study: the local pool, or the machines of a cluster."""

from pathlib import Path

from lengthwise.errors import check_choice, check_int, check_number
from lengthwise.study.config import ENGINES, StudyConfig
from lengthwise.study.engine import Engine, LocalPool, check_shared, parallel_jobs
from lengthwise.study.runs import StudyRun


def check_engine(config: StudyConfig) -> None:
    """An error for options of an engine that make no sense, before anything is trained."""
    check_choice("engine", config.engine, ENGINES)
    for name in ("jobs", "cpus"):
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name))
    check_int("retries", config.retries, least=0)
    if config.gpus is not None:
        check_number("gpus", config.gpus)
    used = {"address": config.address is not None, "slurm": bool(config.slurm)}
    owners = {"address": "ray", "slurm": "slurm"}
    for name, is_given in used.items():
        if is_given and config.engine != owners[name]:
            raise ValueError(f"--{name} is for --engine {owners[name]}, got --engine {config.engine}")
    if config.engine == "local" and (config.gpus is not None or config.cpus is not None):
        raise ValueError(
            "--gpus and --cpus are for --engine ray and slurm, got --engine local; see --device and --jobs"
        )


def make_engine(config: StudyConfig, waiting: list[StudyRun]) -> Engine:
    """The engine that a study names, once all of its machines are seen to share the study's folder."""
    if config.engine == "local" or not waiting:
        return LocalPool(parallel_jobs(config, waiting))
    # The packages of both are extras, which the local pool must not need.
    if config.engine == "ray":
        from lengthwise.study.ray_engine import RayEngine

        engine: Engine = RayEngine(config, jobs=config.jobs or len(waiting))
    else:
        from lengthwise.study.slurm_engine import SlurmEngine

        engine = SlurmEngine(config, jobs=config.jobs or len(waiting))
    try:
        check_shared(engine, Path(config.out))
    except BaseException:
        engine.close()
        raise
    return engine
