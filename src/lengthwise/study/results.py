"""The results of a study as data: the table, how each encoding holds beyond its training length, speed, and origin."""

import math
import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from lengthwise import __version__
from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.files import processor_name
from lengthwise.study.config import StudyConfig
from lengthwise.study.runs import StudyRun

UNDER_TRAINED = 1.25
"""An encoding this many times above the best at the training length has not learned enough to be judged beyond it."""


@dataclass(frozen=True)
class TrainingOutcome:
    """How the training of a run ended: what it used, or why it failed."""

    seconds: float
    peak_bytes: int
    threads: int
    failure: str | None = None


@dataclass(frozen=True)
class StudyResults:
    """Everything that the report is made of."""

    config: StudyConfig
    runs: list[StudyRun]
    table: LengthTable | None
    tasks: list[TaskScore]
    outcomes: dict[str, TrainingOutcome]
    missing: dict[str, str]
    """Runs that are not in the table, and why."""
    undrawn: dict[str, str]
    """Runs whose heads could not be drawn, and why."""
    seconds: float

    @property
    def train_length(self) -> int:
        """The length that all were trained at."""
        return self.runs[0].resolved.length

    @property
    def far_length(self) -> int | None:
        """Eight times the training length, else the longest beyond it; None if nothing was measured beyond it."""
        beyond = [n for n in self.table.lengths if n > self.train_length] if self.table is not None else []
        return 8 * self.train_length if 8 * self.train_length in beyond else beyond[-1] if beyond else None

    def rise(self, name: str, length: int) -> float | None:
        """How many times its value at the training length an encoding has at another, if both were measured."""
        table = self.table
        if table is None or not table.seeds(name, length) or not table.seeds(name, self.train_length):
            return None
        return table.cell(name, length).value / table.cell(name, self.train_length).value

    def gap(self, name: str) -> float:
        """How many times the best value an encoding has at the training length."""
        assert self.table is not None
        values = [self.table.cell(other, self.train_length).value for other in self.table.names]
        best = min((value for value in values if not math.isnan(value)), default=math.nan)
        return self.table.cell(name, self.train_length).value / best

    def under_trained(self) -> list[str]:
        """Encodings that are too far behind at the training length to be compared beyond it."""
        if self.table is None or self.train_length not in self.table.lengths:
            return []
        return [name for name in self.table.names if self.gap(name) > UNDER_TRAINED]

    def speed_rows(self) -> list[list[str]]:
        """A heading and a line per run: steps, threads, tokens a second, seconds, peak memory."""
        rows = [["run", "steps", "threads", "tokens/s", "seconds", "peak memory"]]
        for run in self.runs:
            metrics = run.run.metrics if run.run is not None else []
            if not metrics:
                continue
            last, outcome = metrics[-1], self.outcomes.get(run.name)
            peak = f"{outcome.peak_bytes / 2**20:,.0f} MiB" if outcome is not None else "not measured"
            threads = str(outcome.threads) if outcome is not None else "not measured"
            speed = f"{last['tokens'] / last['seconds']:,.0f}" if last["seconds"] else "-"
            rows.append([run.name, f"{last['step']:,}", threads, speed, f"{last['seconds']:,.0f}", peak])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The values, for tables made elsewhere; the scores themselves are in the scores folder."""
        table = self.table
        under_trained = self.under_trained()
        rows: list[dict[str, Any]] = []
        for name in table.names if table is not None else []:
            assert table is not None
            cells = {n: table.cell(name, n) for n in table.lengths}
            rows.append(
                {
                    "encoding": name,
                    "values": {n: None if c.refused else c.value for n, c in cells.items()},
                    "intervals": {n: None if c.refused else list(c.interval) for n, c in cells.items()},
                    "refused": {n: c.refused for n, c in cells.items() if c.refused},
                    "under_trained": name in under_trained,
                }
            )
        settings = self.runs[0].resolved.stored()
        return {
            "metric": table.metric if table is not None else None,
            "notes": table.notes() if table is not None else [],
            "train_length": self.train_length,
            "rows": rows,
            "speed": self.speed_rows(),
            "missing": self.missing,
            "settings": {name: value for name, value in settings.items() if name not in ("encoding", "seed")},
            "seeds": self.config.seeds,
            "seconds": self.seconds,
            "born": origin("lengthwise study"),
        }


def origin(command: str) -> dict[str, Any]:
    """What a reader needs to measure the same again."""
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {
            "lengthwise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
