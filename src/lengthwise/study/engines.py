"""Which engine trains the runs of a study: the local pool, or the machines of a cluster."""

from pathlib import Path

from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import Engine, LocalPool, check_shared, parallel_jobs
from lengthwise.study.runs import StudyRun


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

        # Any other cluster of submitit is this machine.
        is_cluster = config.slurm.get("cluster", "slurm") == "slurm"
        jobs = config.jobs or len(waiting) if is_cluster else parallel_jobs(config, waiting)
        engine = SlurmEngine(config, jobs=jobs)
    try:
        check_shared(engine, Path(config.out))
    except BaseException:
        engine.close()
        raise
    return engine
