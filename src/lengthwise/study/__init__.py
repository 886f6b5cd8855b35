"""Several encodings trained, measured and drawn, and one report of it: the main job.

config.py has the options of a study, runs.py its runs; execute.py does it, engine.py trains, evaluator.py measures,
results.py has what was measured, and report.py writes it.
"""

from typing import TYPE_CHECKING, Any

from lengthwise.study.config import StudyConfig

if TYPE_CHECKING:
    from lengthwise.study.execute import run_study

__all__ = ["StudyConfig", "run_study"]


def __getattr__(name: str) -> Any:
    """Load torch only when a study is run: the command line needs only the config for --help."""
    if name == "run_study":
        from lengthwise.study.execute import run_study

        return run_study
    raise AttributeError(f"module 'lengthwise.study' has no attribute {name!r}")
