"""How far the runs of a study are, read from its folder alone: from any machine that sees it, while others train."""

import sys
import time

from lengthwise.study.config import StudyConfig
from lengthwise.study.runs import StudyRun, study_runs

SECONDS = 2.0
"""Between two looks."""


def watch_study(config: StudyConfig) -> str:
    """A table that is written anew until every run has ended; without a terminal once."""
    runs = study_runs(config)
    if not sys.stdout.isatty():
        return status_table(runs)
    while not all(run.is_finished for run in runs):
        # The cursor to the start, and all below it empty.
        print(f"\x1b[H\x1b[J{status_table(runs)}", flush=True)
        time.sleep(SECONDS)
    return status_table(runs)


def status_table(runs: list[StudyRun]) -> str:
    """A line per run: what it does, its steps, loss, held-out loss and speed."""
    rows = [["run", "state", "steps", "loss", "held-out", "tokens/s"], *map(_status, runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    done = sum(run.is_finished for run in runs)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"{done} of {len(runs)} runs are finished"])


def _status(run: StudyRun) -> list[str]:
    metrics = run.run.metrics if run.run is not None else []
    steps = f"{run.steps_done:,} of {run.resolved.steps:,}"
    if run.is_finished:
        state = "finished"
    elif run.is_being_trained:
        state = "training"
    else:
        state = "stopped" if metrics else "waiting"
    if not metrics:
        return [run.name, state, steps, "", "", ""]
    last = metrics[-1]
    held_out: dict[str, float] = next((line["held_out"] for line in reversed(metrics) if "held_out" in line), {})
    speed = f"{last['tokens'] / last['seconds']:,.0f}" if last["seconds"] else ""
    values = ", ".join(f"{value:.3f}" for value in held_out.values())
    return [run.name, state, steps, f"{last['loss']:.3f}", values, speed]
