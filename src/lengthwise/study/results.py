"""The results of a study as data: the table, how each encoding holds beyond its training length, speed, and origin."""

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.retrieval_table import RetrievalScore, RetrievalTable
from lengthwise.evaluate.statistics import Interval, t_interval, wilson
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.origin import origin
from lengthwise.study.config import HYPOTHESIS_KINDS, StudyConfig
from lengthwise.study.record import RunRecord, TrainingOutcome, TrainingSummary
from lengthwise.study.runs import RATES, StudyRun
from lengthwise.train.config import RateChoice, choice_from, rate_choice

UNDER_TRAINED = 1.25
"""An encoding this many times above the best at the training length has not learned enough to be judged beyond it.

The best of those that leave the scores as they are: a network over the scores can do what no position can, such as find
what stood after a token's last occurrence in one layer, and is no measure of what the others could have learned."""
BEHIND = 1.15
"""An encoding this many times above the same is named with the rates that were tried for it."""
TUNING = "tuning.json"


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
    records: dict[str, RunRecord] = field(default_factory=dict)
    """By run, of those that were measured."""

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

    def seed_rises(self, name: str, length: int) -> dict[int | None, float]:
        """By seed: the rise of an encoding above its own value at the training length, on the same tokens."""
        return {} if self.table is None else self.table.rises(name, length, self.train_length)

    def rise(self, name: str, length: int) -> float | None:
        """The mean over seeds of each one's rise, if it was measured."""
        return None if (measured := self._rise(name, length)) is None else measured[0]

    def rise_interval(self, name: str, length: int) -> Interval | None:
        """Of the rise: by Student's t over seeds, or with one seed over documents."""
        return None if (measured := self._rise(name, length)) is None else measured[1]

    def _rise(self, name: str, length: int) -> tuple[float, Interval] | None:
        if self.table is None:
            return None
        try:
            return self.table.rise(name, length, self.train_length)
        except ValueError:  # not measured at both lengths, or on other tokens
            return None

    @cached_property
    def best(self) -> str | None:
        """The encoding with the lowest value at the training length; None where none was measured there."""
        return self._lowest(self._measured_names())

    @cached_property
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
        if self.table is None or other is None or other == name:
            return None
        try:
            return self.table.difference(name, other, self.train_length)
        except ValueError:  # other tokens, or no seed that both have
            return None

    def measured_seeds(self, name: str) -> int:
        """With how many seeds an encoding was measured."""
        if self.table is None or name not in self.table.names:
            return 0
        return max(len(self.table.seeds(name, length)) for length in self.table.lengths)

    def _measured_names(self) -> list[str]:
        """The encodings; a stretched model has the weights of one, and is none itself."""
        table, encodings = self.table, {run.encoding for run in self.runs}
        names = [] if table is None else [name for name in table.names if table.seeds(name, self.train_length)]
        return [name for name in names if name in encodings]

    def _lowest(self, names: list[str]) -> str | None:
        return min(names, key=self._value, default=None)

    def _value(self, name: str) -> float:
        assert self.table is not None
        return self.table.cell(name, self.train_length).value

    def hypotheses(self) -> list[JudgedHypothesis]:
        """The study's hypotheses on eight times the training length, judged."""
        judged = []
        for encoding, bounds in self.config.hypotheses.items():
            for kind, bound in bounds.items():
                values, interval = self._measured(encoding, HYPOTHESIS_KINDS[kind].quantity)
                judged.append(JudgedHypothesis(encoding, kind, bound, values, interval))
        return judged

    def _measured(self, name: str, quantity: str) -> tuple[list[float], Interval | None]:
        """What was measured of a hypothesis: a value a seed, and their interval; none where it was not."""
        table, retrieval, far, length = self.table, self.retrieval_table, 8 * self.train_length, self.train_length
        if quantity == "rise":
            if table is None or name not in table.names:
                return [], None
            return list(self.seed_rises(name, far).values()), self.rise_interval(name, far)
        if retrieval is None or name not in retrieval.names:
            return [], None
        if quantity == "length":
            tried = retrieval.tried(name)
            longest = [float(n) for n in tried if retrieval.seeds(name, n)][-1:]
            if not longest:
                return [], None
            # Where no longer one was tried it may take any.
            return longest, Interval(longest[0], longest[0] if tried[-1] > longest[0] else math.inf)
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

    def behind(self) -> list[str]:
        """Encodings that are well behind the best at the training length; see `BEHIND`."""
        return [name for name in self._measured_names() if self.gap(name) > BEHIND]

    def rate_choices(self) -> dict[str, RateChoice]:
        """By encoding: how its learning rates were chosen; none of those whose rates are given, or the recipe's."""
        path = Path(self.config.out) / TUNING
        if self.config.tune and path.exists():
            content = json.loads(path.read_text())
            found = {run.encoding: choice_from(content, run.encoding) for run in self.runs}
        else:
            found = {run.encoding: rate_choice(run.resolved) for run in self.runs}
        return {encoding: choice for encoding, choice in found.items() if choice is not None}

    @property
    def rates_chosen_on(self) -> list[str]:
        """The data on which learning rates were chosen."""
        return sorted({choice.data for choice in self.rate_choices().values()})

    @property
    def is_test(self) -> bool | None:
        """Whether learning rates were chosen on other data than these, and with other seeds; None where unknown."""
        texts = {self.config.training.data, self.config.evaluation.text or self.config.training.data}
        choices = self.rate_choices()
        if texts & {*self.rates_chosen_on} or {choice.seed for choice in choices.values()} & {*self.config.seeds}:
            return False
        return True if {run.encoding for run in self.runs} <= choices.keys() else None

    def task_shares(self) -> list["TaskShare"]:
        """How often each encoding was right, task by task and by length: depths pooled, and each seed by itself."""
        runs = {run.name: run for run in self.runs}
        groups: dict[tuple[str, str, int], list[TaskScore]] = defaultdict(list)
        for score in self.tasks:
            groups[score.task, runs[score.name].encoding, score.length].append(score)
        shares = []
        tasks = list(dict.fromkeys(score.task for score in self.tasks))
        for (task, encoding, length), scores in sorted(groups.items(), key=lambda group: tasks.index(group[0][0])):
            counts: dict[int, list[int]] = {}
            for score in scores:
                if not score.refused:
                    exact, examples = counts.get(runs[score.name].seed, (0, 0))
                    counts[runs[score.name].seed] = [exact + score.exact, examples + score.examples]
            tokens = [score.tokens for score in scores if not score.refused]
            mean = sum(tokens) / len(tokens) if tokens else math.nan
            refused = next((score.refused for score in scores if score.refused), None)
            shares.append(TaskShare(task, encoding, length, counts, mean, None if counts else refused))
        return shares

    @property
    def scoring_share(self) -> float | None:
        """How much of the time of training and scoring was scoring, of the runs of which both are known."""
        known = [record for record in self.records.values() if record.measuring_seconds is not None]
        scoring = sum(record.measuring_seconds or 0.0 for record in known)
        return scoring / (scoring + sum(record.training.seconds for record in known)) if scoring else None

    def speed_rows(self) -> list[list[str]]:
        """A heading and a line per run: steps, threads, tokens a second, seconds, peak memory, work that is skipped."""
        rows = [["run", "steps", "threads", "tokens/s", "seconds", "peak memory", "skipped"]]
        for run in (*self.runs, *self.later):
            trained, outcome = self.trained.get(run.name), self.outcomes.get(run.name)
            if trained is None:
                continue
            peak = threads = "not measured"
            if outcome is not None and outcome.threads:  # that of a run whose machine was lost has none of it
                threads = str(outcome.threads)
                peak = f"{outcome.peak_bytes / 2**20:,.0f} MiB" if outcome.peak_bytes else peak
            speed = f"{trained.tokens / trained.seconds:,.0f}" if trained.seconds else "-"
            shares = self.skipped.get(run.name, {})
            skipped = ", ".join(f"{share:.0%} at {n:,}" for n, share in shares.items()) or "not measured"
            rows.append([run.name, f"{trained.step:,}", threads, speed, f"{trained.seconds:,.0f}", peak, skipped])
        return rows

    def as_json(self) -> dict[str, Any]:
        """The values, for tables made elsewhere; the scores themselves are in the records."""
        table = self.table
        settings = self._shared_settings()
        return {
            "metric": table.metric if table is not None else None,
            "notes": table.notes() if table is not None else [],
            "train_length": self.train_length,
            "text": self.config.evaluation.text or self.config.training.data,
            "rows": [] if table is None else [self._row_json(table, name) for name in table.names],
            "tasks": [share.as_json() for share in self.task_shares()],
            "speed": self.speed_rows(),
            "missing": self.missing,
            "hypotheses": [judged.as_json() for judged in self.hypotheses()],
            "rates": {"chosen_on": self.rates_chosen_on, "is_test": self.is_test},
            "retrieval": [asdict(score) for score in self.retrieval],
            "settings": settings,
            "runs": {run.name: _own_options(run, settings) for run in (*self.runs, *self.later)},
            "seeds": self.config.seeds,
            "seconds": self.seconds,
            "born": origin(),
        }

    def _shared_settings(self) -> dict[str, Any]:
        """The options of training that are the same in every run but the contrastive ones."""
        first, *others = [run.resolved.stored() for run in self.runs]
        shared = {name: value for name, value in first.items() if all(other[name] == value for other in others)}
        return {name: value for name, value in shared.items() if name not in ("encoding", "seed")}

    def _row_json(self, table: LengthTable, name: str) -> dict[str, Any]:
        cells, far = {n: table.cell(name, n) for n in table.lengths}, self.far_length
        row: dict[str, Any] = {
            "encoding": name,
            "seeds_measured": self.measured_seeds(name),
            "intervals_over": intervals_over(self.measured_seeds(name)),
            "values": {n: None if c.refused else c.value for n, c in cells.items()},
            "intervals": {n: None if c.refused else list(c.interval) for n, c in cells.items()},
            "refused": {n: c.refused for n, c in cells.items() if c.refused},
            "under_trained": name in self.under_trained(),
            "rescores": self.rescores(name),
            "is_best": name == self.best,
            "is_best_unchanged": name == self.best_unchanged,
            "above_best": self._above_json(table, name, self.best),
            "above_best_unchanged": self._above_json(table, name, self.best_unchanged),
        }
        if (choice := self.rate_choices().get(name)) is not None:
            row["rates"] = {"data": choice.data, "tries": len(choice.tries)}
        if far is not None:
            rises, interval = self.seed_rises(name, far), self.rise_interval(name, far)
            row["rise"] = {
                "length": far,
                "seeds": list(rises.values()),
                "seed_numbers": list(rises),
                "interval": None if interval is None else list(interval),
                "intervals_over": intervals_over(len(rises)),
            }
        return row

    def _above_json(self, table: LengthTable, name: str, best: str | None) -> dict[str, Any] | None:
        gap = self.above(name, best)
        if gap is None or best is None:
            return None
        seeds = table.paired_seeds(name, best, self.train_length)
        return {
            "value": gap[0],
            "interval": list(gap[1]),
            "seeds_measured": seeds,
            "intervals_over": intervals_over(seeds),
        }


class TaskShare(NamedTuple):
    """How often an encoding gave the whole answer of a task at a length."""

    task: str
    encoding: str
    length: int
    counts: dict[int, list[int]]
    """By seed: how many examples were right, and how many there were, all depths together."""
    tokens: float
    """The share of answers' tokens that are right, given the right ones before: a mean over seeds and depths."""
    refused: str | None
    """Why there is none, if there is none."""

    @property
    def seeds(self) -> dict[int, float]:
        """The share of each seed."""
        return {seed: exact / examples for seed, (exact, examples) in self.counts.items()}

    @property
    def share(self) -> float:
        """The mean over seeds."""
        return sum(self.seeds.values()) / len(self.counts) if self.counts else math.nan

    @property
    def interval(self) -> Interval:
        """By Student's t over seeds, cut at 0 and 1; of one seed, or of seeds that agree, Wilson's over examples."""
        if self.over_seeds:
            low, high = t_interval(list(self.seeds.values()))
            return Interval(max(0.0, low), min(1.0, high))
        counts = self.counts.values()
        return wilson(sum(exact for exact, _ in counts), sum(examples for _, examples in counts))

    @property
    def over_seeds(self) -> bool:
        """Whether the interval is over seeds: where all have the same share they say nothing of how they differ."""
        return len({*self.seeds.values()}) > 1

    def as_json(self) -> dict[str, Any]:
        """For study.json."""
        found = {"task": self.task, "encoding": self.encoding, "length": self.length, "refused": self.refused}
        if self.refused is not None:
            return found
        return found | {
            "share": self.share,
            "tokens": self.tokens,
            "interval": list(self.interval),
            "intervals_over": "seeds" if self.over_seeds else "examples",
            "seeds": list(self.seeds.values()),
            "seed_numbers": list(self.seeds),
            "examples": sum(examples for _, examples in self.counts.values()),
        }


def _own_options(run: StudyRun, settings: dict[str, Any]) -> dict[str, Any]:
    """A run's options that are not the settings of all, and its learning rates in any case."""
    stored = run.resolved.stored()
    own = {name: stored[name] for name in stored if name not in settings or settings[name] != stored[name]}
    return own | {name: stored[name] for name in RATES}


def intervals_over(seeds: int) -> str:
    """What an interval of so many seeds is over."""
    return "seeds" if seeds > 1 else "documents"
