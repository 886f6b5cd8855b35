"""Scores of retrieval by query, and their table: means, intervals, paired differences, files and the figure."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lengthwise.evaluate.statistics import Interval, Sums, bootstrap, paired_difference, t_interval
from lengthwise.evaluate.table import aligned, markdown
from lengthwise.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BM25 = "BM25"
RankMetric = Literal["ndcg", "recall", "mrr"]
RANK_METRICS: dict[RankMetric, str] = {"ndcg": "nDCG@10", "recall": "recall@10", "mrr": "MRR@10"}


@dataclass(frozen=True)
class RetrievalScore:
    """One model on one set at one length of documents, by query."""

    name: str
    length: int
    set_name: str
    documents: int
    groups: list[str] = field(default_factory=list)
    """What each query belongs to; intervals resample these."""
    ndcg: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    mrr: list[float] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """What a reader must know of the queries, such as how many were cut."""
    refused: str | None = None
    """Why there is no measurement, if there is none."""

    def value(self, metric: RankMetric = "ndcg") -> float:
        """The mean over queries."""
        return float(np.mean(getattr(self, metric))) if not self.refused else math.nan

    def sums(self, metric: RankMetric = "ndcg") -> Sums:
        """By group: the sum over its queries, and how many they are."""
        _, which = np.unique(self.groups, return_inverse=True)
        totals: NDArray[np.float64] = np.bincount(which, weights=getattr(self, metric)).astype(float)
        return totals, np.bincount(which).astype(float)


def as_scores(stored: Sequence[dict[str, Any]]) -> list[RetrievalScore]:
    """Scores that were written as plain values."""
    return [RetrievalScore(**score) for score in stored]


class RetrievalTable:
    """Rows by name, columns by length.

    An interval of several seeds is by Student's t over them, on these queries; of one score it is over queries.
    """

    def __init__(self, scores: Sequence[RetrievalScore], *, rows: Mapping[str, tuple[str, int]] | None = None) -> None:
        """`rows` gives the row and the seed of a name where several are seeds of one; else each has its own row."""
        if not scores:
            raise ValueError("a table needs at least one score, got none")
        self.scores = list(scores)
        self.lengths = sorted({score.length for score in scores})
        self._cells: dict[tuple[str, int], list[RetrievalScore]] = {}
        self._seeds: dict[str, int | None] = {}
        for score in scores:
            row, seed = (rows or {}).get(score.name, (score.name, None))
            self._seeds[score.name] = seed
            seeds = self._cells.setdefault((row, score.length), [])
            if any(self._seeds[other.name] == seed for other in seeds):
                raise ValueError(
                    f"names and seeds must differ in one table, got {score.name!r} twice at length {score.length}"
                )
            seeds.append(score)
        self.names = list(dict.fromkeys(name for name, _ in self._cells))

    def seeds(self, name: str, length: int) -> list[RetrievalScore]:
        """The scores behind a cell that were not refused."""
        return [score for score in self._cells.get((name, length), []) if not score.refused]

    def tried(self, name: str) -> list[int]:
        """The lengths that a row has scores at, refused ones too."""
        return [length for length in self.lengths if (name, length) in self._cells]

    def value(self, name: str, length: int, metric: RankMetric = "ndcg") -> float:
        """The mean over seeds; NaN where nothing was measured."""
        seeds = self.seeds(name, length)
        return float(np.mean([score.value(metric) for score in seeds])) if seeds else math.nan

    def interval(self, name: str, length: int, metric: RankMetric = "ndcg") -> Interval:
        """Of several seeds by Student's t; of one, where it lies in 95 of 100 resamplings of groups of queries."""
        seeds = self.seeds(name, length)
        if len(seeds) > 1:
            return t_interval([score.value(metric) for score in seeds])
        return bootstrap(seeds[0].sums(metric))

    def change(self, name: str, length: int, since: int, metric: RankMetric = "ndcg") -> tuple[float, Interval]:
        """How much more it is at a length than at another, for the same queries."""
        return self._paired(self.seeds(name, length), self.seeds(name, since), metric)

    def difference(self, name: str, other: str, length: int, metric: RankMetric = "ndcg") -> tuple[float, Interval]:
        """How much more one has than another, for the same queries."""
        return self._paired(self.seeds(name, length), self.seeds(other, length), metric)

    def _paired(
        self, first: list[RetrievalScore], second: list[RetrievalScore], metric: RankMetric
    ) -> tuple[float, Interval]:
        if not first or not second or any(score.groups != first[0].groups for score in (*first, *second)):
            raise ValueError("a paired difference needs the same queries in both; measure both in one call")
        # What has no seed, such as BM25, is set against every seed.
        pairs = [
            (one, other)
            for one in first
            for other in second
            if self._seeds[one.name] == self._seeds[other.name]
            or None in (self._seeds[one.name], self._seeds[other.name])
        ]
        if not pairs:
            raise ValueError("a paired difference needs a seed that both have, got none")
        if len(pairs) == 1:
            return paired_difference(*(score.sums(metric) for score in pairs[0]))
        differences = [one.value(metric) - other.value(metric) for one, other in pairs]
        return float(np.mean(differences)), t_interval(differences)

    def rows(self, metric: RankMetric = "ndcg") -> list[list[str]]:
        """A heading and a line a model: the value and its interval."""

        def cell(name: str, length: int) -> str:
            if not self.seeds(name, length):
                return "-"
            interval = self.interval(name, length, metric)
            return f"{self.value(name, length, metric):.3f} ({interval.text('{:.3f}'.format)})"

        head = [RANK_METRICS[metric], *(f"{length:,}" for length in self.lengths)]
        return [head, *([name, *(cell(name, n) for n in self.lengths)] for name in self.names)]

    def change_rows(self, since: int, metric: RankMetric = "ndcg") -> list[list[str]]:
        """How much each changes from one length to the longer ones, for the same queries."""
        beyond = [n for n in self.lengths if n > since]
        head = [f"{RANK_METRICS[metric]} since {since:,}", *(f"{n:,}" for n in beyond)]
        return [
            head,
            *([name, *(_signed(self.change, name, n, since, metric) for n in beyond)] for name in self.names),
        ]

    def difference_rows(self, metric: RankMetric = "ndcg") -> list[list[str]]:
        """How much more each has than the model that is best at the longest length, for the same queries."""
        longest = self.lengths[-1]
        models = [name for name in self.names if name != BM25 and self.seeds(name, longest)]
        best = max(models, key=lambda name: self.value(name, longest, metric), default=None)
        others = [name for name in self.names if name != best]
        if best is None or not others:
            return []
        head = [f"{RANK_METRICS[metric]} above {best}", *(f"{n:,}" for n in self.lengths)]
        return [
            head,
            *([name, *(_signed(self.difference, name, best, n, metric) for n in self.lengths)] for name in others),
        ]

    def notes(self) -> list[str]:
        """The set, and the reason for each missing cell."""
        first = next((score for score in self.scores if not score.refused), self.scores[0])
        notes = [
            f"{first.set_name}: {len(first.ndcg):,} queries, {first.documents:,} documents, the same at every length; "
            f"{self._interval_note()}"
        ]
        measured = [score for score in self.scores if not score.refused]
        for note in dict.fromkeys(note for score in measured for note in score.notes):
            having = dict.fromkeys(score.name for score in measured if note in score.notes)
            every = len(having) == len({score.name for score in measured})
            notes.append(note if every else f"{', '.join(having)}: {note}")
        return notes + [f"{s.name} at {s.length:,}: {s.refused}" for s in self.scores if s.refused]

    def _interval_note(self) -> str:
        if all(len(scores) == 1 for scores in self._cells.values()):
            if all(len(set(score.groups)) == 1 for score in self.scores if not score.refused):
                return "no 95 % intervals: the queries are of one group"
            return "95 % intervals over groups of queries"
        return "95 % intervals by Student's t over seeds, of one score over groups of queries"

    def text(self) -> str:
        """All metrics, aligned for a terminal, with the notes."""
        return "\n\n".join([*(aligned(self.rows(metric)) for metric in RANK_METRICS), "\n".join(self.notes())])

    def markdown(self) -> str:
        """All metrics as Markdown tables with the notes."""
        tables = "\n\n".join(markdown(self.rows(metric)) for metric in RANK_METRICS)
        return "\n".join([tables, "", *(f"- {note}" for note in self.notes())])

    def csv(self) -> str:
        """A line a cell and metric."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "length", "metric", "value", "low", "high", "seeds", "queries", "refused"])
        for (name, length), scores in self._cells.items():
            for metric in RANK_METRICS:
                seeds = self.seeds(name, length)
                ends = self.interval(name, length, metric) if seeds else (math.nan, math.nan)
                reason = "" if seeds else scores[0].refused
                value = self.value(name, length, metric)
                writer.writerow([name, length, metric, value, *ends, len(seeds), len(scores[0].ndcg), reason])
        return out.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """JSON by query, CSV, Markdown and a figure."""
        from lengthwise.views.style import save_picture

        texts = {
            "retrieval.json": json.dumps([asdict(score) for score in self.scores], indent=1),
            "retrieval.csv": self.csv(),
            "retrieval.md": self.markdown(),
        }
        written = [write_atomic(folder / name, content.rstrip("\n") + "\n") for name, content in texts.items()]
        save_picture(retrieval_figure(self), folder / "retrieval.png", force=True)
        return [*written, folder / "retrieval.png"]


def _signed(paired: Callable[..., tuple[float, Interval]], *arguments: str | int) -> str:
    """A paired difference as the text of a cell; "-" where there is none."""
    try:
        value, interval = paired(*arguments)
    except ValueError:
        return "-"
    return f"{value:+.3f} ({interval.text('{:+.3f}'.format)})"


def retrieval_figure(table: RetrievalTable, *, train_length: int | None = None) -> "Figure":
    """nDCG@10 against the length of documents, a line a model with its interval, the training length marked."""
    from lengthwise.views.line_plot import Line, lines_figure

    lines = []
    for name in table.names:
        known = [n for n in table.lengths if table.seeds(name, n)]
        if known:
            ends = [table.interval(name, n) for n in known]
            values = [table.value(name, n) for n in known]
            lines.append(Line(name, known, values, [e.low for e in ends], [e.high for e in ends]))
    return lines_figure(
        lines,
        title="nDCG@10 against the length of documents, with 95 % intervals",
        across="tokens of a document",
        up="nDCG@10",
        marked=train_length,
        log=False,
    )
