"""How far the runs of a study are and which are missing, read from its folder alone: from any machine that sees it."""

import logging
import sys
import time

from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.study.config import StudyConfig
from lengthwise.study.record import differences, is_recorded, read_outcome, record_key, record_path
from lengthwise.study.runs import StudyRun, contrastive_runs, evaluation_of, study_runs

log = logging.getLogger(__name__)
SECONDS = 2.0
"""Between two looks."""


def missing_commands(config: StudyConfig) -> list[str]:
    """One command for each run that is missing, contrastive ones last; else any scheduler may run them in any order."""
    runs = study_runs(config)
    later = contrastive_runs(config, runs)
    for run in (*runs, *later):
        run.check_finished()
    # A contrastive run starts from the weights of a masked one, so that a record of that is not enough.
    evaluation = evaluation_of(config, runs[0])
    missing = [run for run in runs if not run.is_finished and (later or not is_recorded(config.out, run, evaluation))]
    for run in missing:
        if differing := differences(record_path(config.out, run), record_key(run, evaluation)):
            log.info("%s is to be trained again: its record differs in %s", run.name, ", ".join(differing))
    return [run.command for run in (*missing, *(run for run in later if not run.is_finished))]


def watch_study(config: StudyConfig) -> str:
    """A table that is written anew until every run has ended; without a terminal once."""
    runs = study_runs(config)
    runs += contrastive_runs(config, runs)
    evaluation = evaluation_of(config, runs[0])
    while sys.stdout.isatty() and not all(has_ended(run, config.out, evaluation) for run in runs):
        # The cursor to the start, and all below it empty.
        print(f"\x1b[H\x1b[J{status_table(runs, config.out, evaluation)}", flush=True)
        time.sleep(SECONDS)
    return status_table(runs, config.out, evaluation)


def has_ended(run: StudyRun, out: str, evaluation: ResolvedEvalConfig) -> bool:
    """Whether a study does no more for a run: it is finished, was measured elsewhere, or failed."""
    return run.is_finished or is_recorded(out, run, evaluation) or has_failed(run, out)


def has_failed(run: StudyRun, out: str) -> bool:
    """Whether the last try to train it failed, and there is no other yet."""
    outcome = read_outcome(out, run)
    return outcome is not None and outcome.failure is not None and not run.is_finished and not run.is_being_trained


def status_table(runs: list[StudyRun], out: str, evaluation: ResolvedEvalConfig) -> str:
    """A line per run: what it does, its steps, loss, held-out loss and speed."""
    recorded = {run.name for run in runs if is_recorded(out, run, evaluation)}
    rows = [["run", "state", "steps", "loss", "held-out", "tokens/s"]]
    rows += [_status(run, out, is_recorded=run.name in recorded) for run in runs]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    done = sum(run.is_finished or run.name in recorded for run in runs)
    failed = sum(run.name not in recorded and has_failed(run, out) for run in runs)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    summary = f"{done} of {len(runs)} runs are finished" + (f", {failed} failed" if failed else "")
    return "\n".join([*lines, summary])


def _status(run: StudyRun, out: str, *, is_recorded: bool) -> list[str]:
    metrics = run.run.metrics if run.run is not None else []
    steps = f"{run.steps_done:,} of {run.resolved.steps:,}"
    if run.is_finished:
        state = "finished"
    elif run.is_being_trained:
        state = "training"
    elif is_recorded:
        return [run.name, "measured", f"{run.resolved.steps:,} of {run.resolved.steps:,}", "", "", ""]
    elif has_failed(run, out):
        state = "failed"
    else:
        state = "stopped" if metrics else "waiting"
    if not metrics:
        return [run.name, state, steps, "", "", ""]
    last = metrics[-1]
    held_out: dict[str, float] = next((line["held_out"] for line in reversed(metrics) if "held_out" in line), {})
    speed = f"{last['tokens'] / last['seconds']:,.0f}" if last["seconds"] else ""
    values = ", ".join(f"{value:.3f}" for value in held_out.values())
    return [run.name, state, steps, f"{last['loss']:.3f}", values, speed]
