"""What a study found, as data: the table, how each encoding holds beyond its training length, speed, and its birth."""

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
from lengthwise.evaluate.task_scores import TaskScore
from lengthwise.files import processor_name
from lengthwise.study.config import StudyConfig
from lengthwise.study.parts import Part
from lengthwise.study.training import Outcome

UNDER_TRAINED = 1.25
"""An encoding so many times above the best at the training length has not learned enough to be judged beyond it."""


@dataclass(frozen=True)
class Findings:
    """Everything that the report tells."""

    config: StudyConfig
    parts: list[Part]
    table: LengthTable | None
    tasks: list[TaskScore]
    outcomes: dict[str, Outcome]
    missing: dict[str, str]
    """Runs that are not in the table, and why."""
    seconds: float

    @property
    def train_length(self) -> int:
        """The length that all were trained at."""
        return self.parts[0].settings.length

    def rise(self, name: str, length: int) -> float:
        """How many times its value at the training length an encoding has at another."""
        assert self.table is not None
        return self.table.cell(name, length).value / self.table.cell(name, self.train_length).value

    def gap(self, name: str) -> float:
        """How many times the best value an encoding has at the training length."""
        assert self.table is not None
        values = [self.table.cell(other, self.train_length).value for other in self.table.names]
        return self.table.cell(name, self.train_length).value / min(v for v in values if not math.isnan(v))

    def under_trained(self) -> list[str]:
        """Encodings that are too far behind at the training length to be compared beyond it."""
        if self.table is None or self.train_length not in self.table.lengths:
            return []
        return [name for name in self.table.names if self.gap(name) > UNDER_TRAINED]

    def speed_rows(self) -> list[list[str]]:
        """A line per run: steps, threads, tokens a second, seconds, peak memory."""
        rows = [["run", "steps", "threads", "tokens/s", "seconds", "peak memory"]]
        for part in self.parts:
            metrics = part.run.metrics if part.run is not None else []
            if not metrics:
                continue
            last, outcome = metrics[-1], self.outcomes.get(part.name)
            peak = f"{outcome.peak_bytes / 2**20:,.0f} MiB" if outcome is not None else "not measured"
            threads = str(outcome.threads) if outcome is not None else "not measured"
            pace = f"{last['tokens'] / last['seconds']:,.0f}" if last["seconds"] else "-"
            rows.append([part.name, f"{last['step']:,}", threads, pace, f"{last['seconds']:,.0f}", peak])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The figures, for tables made elsewhere; the scores themselves are in the scores folder."""
        table = self.table
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
                    "under_trained": name in self.under_trained(),
                }
            )
        return {
            "metric": table.metric if table is not None else None,
            "notes": table.notes() if table is not None else [],
            "train_length": self.train_length,
            "rows": rows,
            "speed": self.speed_rows(),
            "missing": self.missing,
            "settings": {k: v for k, v in self.parts[0].settings.kept().items() if k not in ("encoding", "seed")},
            "seeds": self.config.seeds,
            "seconds": self.seconds,
            "born": born("lengthwise study"),
        }


def born(command: str) -> dict[str, Any]:
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
