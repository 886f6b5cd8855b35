"""The results of a study as data: the table, how each encoding holds beyond its training length, speed, and origin."""

import math
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import torch
import transformers

from lengthwise import __version__
from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.retrieval_table import RetrievalScore, RetrievalTable
from lengthwise.evaluate.statistics import Interval, Sums, t_interval
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.files import processor_name, source_commit
from lengthwise.study.config import HYPOTHESIS_KINDS, StudyConfig
from lengthwise.study.record import TrainingOutcome, TrainingSummary
from lengthwise.study.runs import StudyRun

UNDER_TRAINED = 1.25
"""An encoding this many times above the best at the training length has not learned enough to be judged beyond it.

The best of those that leave the scores as they are: a network over the scores can do what no position can, such as find
what stood after a token's last occurrence in one layer, and is no measure of what the others could have learned."""


Verdict = Literal["held", "failed", "not decided", "not measured"]


@dataclass(frozen=True)
class JudgedHypothesis:
    """What was expected of an encoding before the runs, and what was measured."""

    encoding: str
    kind: str
    """One of HYPOTHESIS_KINDS."""
    bound: float
    values: list[float]
    """One a seed."""
    interval: Interval | None

    @property
    def verdict(self) -> Verdict:
        """Held or failed only where the whole interval is on one side of the bound."""
        if self.interval is None:
            return "not measured"
        below, over = self.interval.high <= self.bound, self.interval.low > self.bound
        if not below and not over:
            return "not decided"
        return "held" if below == HYPOTHESIS_KINDS[self.kind].is_upper else "failed"

    def as_json(self) -> dict[str, Any]:
        """For study.json."""
        interval = None if self.interval is None else list(self.interval)
        return {
            "encoding": self.encoding,
            self.kind: self.bound,
            "values": self.values,
            "interval": interval,
            "verdict": self.verdict,
        }


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
    later: list[StudyRun] = field(default_factory=list)
    """The contrastive runs that follow masked ones."""
    retrieval: list[RetrievalScore] = field(default_factory=list)
    skipped: dict[str, dict[int, float]] = field(default_factory=dict)
    """By run and length: the share of attention's work that it leaves out."""
    trained: dict[str, TrainingSummary] = field(default_factory=dict)
    """By run."""

    @property
    def retrieval_table(self) -> RetrievalTable | None:
        """Retrieval by encoding and length; None where it was not measured."""
        rows = {run.name: (run.encoding, run.seed) for run in self.later}
        return RetrievalTable(self.retrieval, rows=rows) if self.retrieval else None

    @property
    def metric_name(self) -> str:
        """What the table has: "perplexity", or of masked tokens "pseudo-perplexity"."""
        metric = "" if self.table is None else self.table.metric.replace("_", " ")
        return f"pseudo-{metric}" if self.config.training.objective == "mlm" else metric

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

    def seed_rises(self, name: str, length: int) -> list[float]:
        """The rise of each seed of an encoding above its own value at the training length, as a share of it."""
        if self.table is None:
            return []
        first = {score.name: score for score in self.table.seeds(name, self.train_length)}
        later = [score for score in self.table.seeds(name, length) if score.name in first]
        metric = self.table.metric
        values = [(ratio(score.sums(metric)), ratio(first[score.name].sums(metric))) for score in later]
        return [math.expm1(a - b) if metric == "perplexity" else a / b - 1 for a, b in values]

    def rise_interval(self, name: str, length: int) -> Interval | None:
        """Of the rise: by Student's t over seeds, or with one seed over documents on the same tokens."""
        rises = self.seed_rises(name, length)
        if len(rises) > 1:
            return t_interval(rises)
        if not rises or self.table is None or self.table.metric != "perplexity":
            return None
        try:
            return Interval(*(math.expm1(end) for end in self.table.change(name, length, self.train_length)[1]))
        except ValueError:  # other tokens at each length
            return None

    @property
    def best(self) -> str | None:
        """The encoding with the lowest value at the training length; None where none was measured there."""
        return self._lowest(self._measured_names())

    @property
    def best_unchanged(self) -> str | None:
        """The best of those that leave the scores as they are; the best of all where none does."""
        return self._lowest([name for name in self._measured_names() if not self.rescores(name)]) or self.best

    def rescores(self, name: str) -> bool:
        """Whether an encoding replaces the scores."""
        return any(run.rescores for run in self.runs if run.encoding == name)

    def above(self, name: str, other: str | None) -> tuple[float, Interval] | None:
        """How much more an encoding costs than another at the training length, on the same tokens.

        In nats per token, or bits per byte; its interval is by Student's t over seeds that both have, or with one seed
        over documents. None for the same one, and where nothing is paired.
        """
        table, length = self.table, self.train_length
        if table is None or other in (None, name) or not table.seeds(name, length):
            return None
        others = {self._seed(score.name): score for score in table.seeds(str(other), length)}
        pairs = [(score, others.get(self._seed(score.name))) for score in table.seeds(name, length)]
        differences = [
            ratio(score.sums(table.metric)) - ratio(theirs.sums(table.metric))
            for score, theirs in pairs
            if theirs is not None and theirs.targets == score.targets
        ]
        if len(differences) > 1:
            return sum(differences) / len(differences), t_interval(differences)
        try:
            return table.difference(name, str(other), length)
        except ValueError:  # other tokens
            return None

    def _measured_names(self) -> list[str]:
        table = self.table
        return [] if table is None else [name for name in table.names if table.seeds(name, self.train_length)]

    def _lowest(self, names: list[str]) -> str | None:
        return min(names, key=self._value, default=None)

    def _value(self, name: str) -> float:
        assert self.table is not None
        return self.table.cell(name, self.train_length).value

    def _seed(self, name: str) -> int | None:
        return next((run.seed for run in self.runs if run.name == name), None)

    def hypotheses(self) -> list[JudgedHypothesis]:
        """The study's hypotheses on the far length, judged."""
        judged = []
        for encoding, bounds in self.config.hypotheses.items():
            for kind, bound in bounds.items():
                values, interval = self._measured(encoding, HYPOTHESIS_KINDS[kind].quantity)
                judged.append(JudgedHypothesis(encoding, kind, bound, values, interval))
        return judged

    def _measured(self, name: str, quantity: str) -> tuple[list[float], Interval | None]:
        """What was measured of a hypothesis: a value a seed, and their interval; none where it was not."""
        table, retrieval, far, length = self.table, self.retrieval_table, self.far_length, self.train_length
        if quantity == "rise":
            if far is None or table is None or name not in table.names:
                return [], None
            return self.seed_rises(name, far), self.rise_interval(name, far)
        if retrieval is None or far is None or name not in retrieval.names:
            return [], None
        if quantity == "length":
            longest = [float(n) for n in retrieval.lengths if retrieval.seeds(name, n)][-1:]
            return longest, Interval(*longest * 2) if longest else None
        first, later = ({s.name: s.value() for s in retrieval.seeds(name, n)} for n in (length, far))
        changes = [later[seed] - first[seed] for seed in later if seed in first]
        return changes, retrieval.change(name, far, length)[1] if changes else None

    def gap(self, name: str) -> float:
        """How many times the best value an encoding has at the training length; see `UNDER_TRAINED`."""
        best = self.best_unchanged
        return math.nan if best is None else self._value(name) / self._value(best)

    def under_trained(self) -> list[str]:
        """Encodings that are too far behind at the training length to be compared beyond it."""
        return [name for name in self._measured_names() if self.gap(name) > UNDER_TRAINED]

    def speed_rows(self) -> list[list[str]]:
        """A heading and a line per run: steps, threads, tokens a second, seconds, peak memory, work that is skipped."""
        rows = [["run", "steps", "threads", "tokens/s", "seconds", "peak memory", "skipped"]]
        for run in (*self.runs, *self.later):
            trained, outcome = self.trained.get(run.name), self.outcomes.get(run.name)
            if trained is None:
                continue
            peak = threads = "not measured"
            if outcome is not None and outcome.threads:  # that of a run whose machine was lost has none of it
                peak, threads = f"{outcome.peak_bytes / 2**20:,.0f} MiB", str(outcome.threads)
            speed = f"{trained.tokens / trained.seconds:,.0f}" if trained.seconds else "-"
            shares = self.skipped.get(run.name, {})
            skipped = ", ".join(f"{share:.0%} at {n:,}" for n, share in shares.items()) or "not measured"
            rows.append([run.name, f"{trained.step:,}", threads, speed, f"{trained.seconds:,.0f}", peak, skipped])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The values, for tables made elsewhere; the scores themselves are in the scores folder."""
        table = self.table
        settings = self.runs[0].resolved.stored()
        return {
            "metric": table.metric if table is not None else None,
            "notes": table.notes() if table is not None else [],
            "train_length": self.train_length,
            "rows": [] if table is None else [self._row_json(table, name) for name in table.names],
            "speed": self.speed_rows(),
            "missing": self.missing,
            "hypotheses": [judged.as_json() for judged in self.hypotheses()],
            "retrieval": [asdict(score) for score in self.retrieval],
            "settings": {name: value for name, value in settings.items() if name not in ("encoding", "seed")},
            "seeds": self.config.seeds,
            "seconds": self.seconds,
            "born": origin("lengthwise study"),
        }

    def _row_json(self, table: LengthTable, name: str) -> dict[str, Any]:
        cells, far = {n: table.cell(name, n) for n in table.lengths}, self.far_length
        bests = {"above_best": self.best, "above_best_unchanged": self.best_unchanged}
        above = {key: self.above(name, best) for key, best in bests.items()}
        row: dict[str, Any] = {
            "encoding": name,
            "values": {n: None if c.refused else c.value for n, c in cells.items()},
            "intervals": {n: None if c.refused else list(c.interval) for n, c in cells.items()},
            "refused": {n: c.refused for n, c in cells.items() if c.refused},
            "under_trained": name in self.under_trained(),
            "rescores": self.rescores(name),
            **{key: None if gap is None else {"value": gap[0], "interval": list(gap[1])} for key, gap in above.items()},
        }
        if far is not None:
            interval = self.rise_interval(name, far)
            ends = None if interval is None else list(interval)
            row["rise"] = {"length": far, "seeds": self.seed_rises(name, far), "interval": ends}
        return row


def ratio(sums: Sums) -> float:
    """The value that sums over documents make."""
    return float(sums[0].sum() / sums[1].sum())


def origin(command: str) -> dict[str, Any]:
    """What a reader needs to measure the same again."""
    return {
        "command": command,
        "commit": source_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {
            "lengthwise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
