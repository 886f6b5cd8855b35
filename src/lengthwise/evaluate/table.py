"""Scores as a table: a row a model (or several seeds of it), a column a length; and as figures.

The value of a cell is perplexity. Perplexities of different tokenizers count different tokens and cannot be compared,
so with more than one tokenizer the table has bits per byte, and a note on the reason.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lengthwise.evaluate.score import Score
from lengthwise.evaluate.statistics import (
    UNKNOWN,
    Holds,
    Interval,
    added,
    bootstrap,
    holds_to,
    interval_words,
    paired_difference,
    ratio_of_sums,
    t_interval,
)
from lengthwise.files import json_text
from lengthwise.origin import origin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = Literal["perplexity", "bits_per_byte"]
METRIC_NAMES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Cell:
    """One value with its interval, or the reason why there is none."""

    value: float
    interval: Interval
    refused: str | None = None

    def __str__(self) -> str:
        return "-" if self.refused else format_value(self.value)


class LengthTable:
    """Rows by name, columns by length.

    An interval of several seeds is by Student's t over them, on these documents; of one score it is over documents.
    """

    def __init__(self, scores: Sequence[Score], *, rows: Mapping[str, tuple[str, int]] | None = None) -> None:
        """`rows` gives the row and the seed of a model's name where several are seeds of one; else each has its own."""
        if not scores:
            raise ValueError("a table needs at least one score, got none")
        self.scores = list(scores)
        self.lengths = sorted({score.length for score in scores})
        self._by_cell: dict[str, dict[int, list[Score]]] = {}
        self._cells: dict[tuple[str, int], Cell] = {}
        self._seed_of: dict[str, int | None] = {}
        for score in scores:
            row, seed = (rows or {}).get(score.name, (score.name, None))
            self._seed_of[score.name] = seed
            seeds = self._by_cell.setdefault(row, {}).setdefault(score.length, [])
            if any(self._seed_of[other.name] == seed for other in seeds):
                raise ValueError(
                    f"names and seeds must differ in one table, got {score.name!r} twice at length {score.length}"
                )
            seeds.append(score)
        mixed = len({score.tokenizer for score in scores}) > 1
        self.metric: Metric = "bits_per_byte" if mixed else "perplexity"

    @property
    def names(self) -> list[str]:
        """The names of the rows, in the order of the scores."""
        return list(self._by_cell)

    def seeds(self, name: str, length: int) -> list[Score]:
        """The scores behind a cell that were not refused."""
        return [score for score in self._by_cell[name].get(length, []) if not score.refused]

    def by_seed(self, name: str, length: int) -> dict[int | None, Score]:
        """The same by seed; a row that is not of seeds has one without a number."""
        return {self._seed_of[score.name]: score for score in self.seeds(name, length)}

    def cell(self, name: str, length: int) -> Cell:
        """The mean over seeds, with an interval over these, or of one over documents, which is computed once."""
        if (name, length) not in self._cells:
            self._cells[name, length] = self._measured_cell(name, length)
        return self._cells[name, length]

    def _measured_cell(self, name: str, length: int) -> Cell:
        seeds = self.seeds(name, length)
        if not seeds:
            reasons = [score.refused for score in self._by_cell[name].get(length, []) if score.refused]
            return Cell(math.nan, UNKNOWN, reasons[0] if reasons else "not measured")
        sums = [score.sums(self.metric) for score in seeds]
        value = self.mean(name, length, self.metric)
        interval = t_interval(list(map(ratio_of_sums, sums))) if len(sums) > 1 else bootstrap(sums[0])
        if self.metric == "perplexity":
            return Cell(math.exp(min(value, 700)), Interval(*(math.exp(min(end, 700)) for end in interval)))
        return Cell(value, interval)

    def mean(self, name: str, length: int, metric: Metric) -> float:
        """The mean over seeds, in nats per token for "perplexity", else in bits per byte; NaN without a score."""
        values = [ratio_of_sums(score.sums(metric)) for score in self.seeds(name, length)]
        return float(np.mean(values)) if values else math.nan

    def difference(self, name: str, other: str, length: int) -> tuple[float, Interval]:
        """How much more one costs than another on the same tokens: nats per token, or bits per byte.

        Over the seeds that both have.
        """
        return self._paired(
            (name, length),
            (other, length),
            f"a paired difference needs {name!r} and {other!r} on the same tokens at {length:,}, with the same seed; "
            "measure both in one call, with one tokenizer",
        )

    def change(self, name: str, length: int, since: int) -> tuple[float, Interval]:
        """How much more one costs at a length than at another on the same tokens: nats per token, or bits per byte."""
        return self._paired(
            (name, length),
            (name, since),
            f"a paired change needs {name!r} on the same tokens at {length:,} and {since:,}; use the protocol fair",
        )

    def rises(self, name: str, length: int, since: int) -> dict[int | None, float]:
        """By seed: how far a row's value rises between two lengths on the same tokens, as a share of the first."""
        pairs = self._pairs((name, length), (name, since))
        values = {
            seed: [ratio_of_sums(score.sums(self.metric)) for score in pair]
            for seed, pair in pairs.items()
            if pair[0].targets == pair[1].targets
        }
        if self.metric == "perplexity":
            return {seed: math.expm1(min(later - first, 700)) for seed, (later, first) in values.items()}
        return {seed: later / first - 1 for seed, (later, first) in values.items()}

    def rise(self, name: str, length: int, since: int) -> tuple[float, Interval]:
        """The mean over seeds of each one's rise on the same tokens, as a share; of bits of one seed no interval."""
        change, interval = self.change(name, length, since)
        rises = list(self.rises(name, length, since).values())
        if len(rises) > 1:
            return float(np.mean(rises)), t_interval(rises)
        if self.metric == "perplexity":
            return math.expm1(min(change, 700)), Interval(*(math.expm1(min(end, 700)) for end in interval))
        return rises[0], UNKNOWN

    def holds(self, name: str) -> Holds | None:
        """To which length a row holds: no loss up to there is more than 2 % above the best at a shorter one.

        None where that cannot be told: with fewer than two lengths, or other tokens at each.
        """
        measured = {n: seeds for n in self.lengths if (seeds := self.seeds(name, n))}
        if len(measured) < 2 or len({score.targets for seeds in measured.values() for score in seeds}) != 1:
            return None
        return holds_to({n: added([score.sums(self.metric) for score in seeds]) for n, seeds in measured.items()})

    def _pairs(self, first: tuple[str, int], second: tuple[str, int]) -> dict[int | None, tuple[Score, Score]]:
        """The scores of two cells, by the seeds that both have."""
        others = self.by_seed(*second)
        return {seed: (score, others[seed]) for seed, score in self.by_seed(*first).items() if seed in others}

    def paired_seeds(self, name: str, other: str, length: int) -> int:
        """How many seeds two rows have in common at a length."""
        return len(self._pairs((name, length), (other, length)))

    def _paired(self, first: tuple[str, int], second: tuple[str, int], message: str) -> tuple[float, Interval]:
        """First minus second, or an error with this message where no seed of both scored the same tokens."""
        pairs = list(self._pairs(first, second).values())
        if not pairs or len({score.targets for pair in pairs for score in pair}) != 1:
            raise ValueError(message)
        sums = [[score.sums(self.metric) for score in pair] for pair in pairs]
        if len(sums) == 1:
            return paired_difference(*sums[0])
        differences = [ratio_of_sums(one) - ratio_of_sums(other) for one, other in sums]
        return float(np.mean(differences)), t_interval(differences)

    def notes(self) -> list[str]:
        """Protocol, text, tokens scored, and the reason for each missing cell."""
        protocols = dict.fromkeys(score.protocol for score in self.scores)
        sources = dict.fromkeys(score.source for score in self.scores)
        counts = {score.scored for score in self.scores if not score.refused}
        scored = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)})) if counts else "no"
        notes = [
            f"{METRIC_NAMES[self.metric]}; {'; '.join(protocols)}",
            f"text: {', '.join(sources)}; {scored} tokens scored",
        ]
        if self.metric == "bits_per_byte":
            notes.append("bits per byte only: the models have different tokenizers, and perplexity counts tokens")
        measured = [score for score in self.scores if not score.refused]
        seeds = [len(self.seeds(name, length)) for name in self.names for length in self.lengths]
        if max(seeds) > 1:
            notes.append(f"95 % intervals {interval_words(seeds)}")
        elif measured and all(len(score.documents) == 1 for score in measured):
            notes.append("no 95 % intervals: the scored tokens are of one document")
        for name in self.names:
            for length in self.lengths:
                if reason := self.cell(name, length).refused:
                    notes.append(f"{name} at {length:,}: {reason}")
        return notes

    def rows(self) -> list[list[str]]:
        """A heading and a line a row, as strings."""
        head = ["model", *(f"{length:,}" for length in self.lengths)]
        return [head, *([name, *(str(self.cell(name, n)) for n in self.lengths)] for name in self.names)]

    def text(self) -> str:
        """Aligned, for a terminal, with the notes."""
        return "\n".join([aligned(self.rows()), "", *self.notes()])

    def markdown(self) -> str:
        """A Markdown table with the notes."""
        return "\n".join([markdown(self.rows()), "", *(f"- {note}" for note in self.notes())])

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def latex(self) -> str:
        """A booktabs table, the best of each column in bold, with the notes as comments."""
        measured = {n: [self.cell(name, n).value for name in self.names if self.seeds(name, n)] for n in self.lengths}
        best = {n: min(values, default=None) for n, values in measured.items()}
        lines = [f"% {note}" for note in self.notes()]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(self.lengths)}}}", r"\toprule"]
        head, *rest = self.rows()
        lines += [" & ".join(head).replace(",", "{,}") + r" \\", r"\midrule"]
        for name, cells in zip(self.names, rest, strict=True):
            values = [
                rf"\textbf{{{word}}}" if self.cell(name, n).value == best[n] else word
                for n, word in zip(self.lengths, cells[1:], strict=True)
            ]
            lines.append(" & ".join([_escaped(name), *values]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def csv(self) -> str:
        """A line a cell, with the interval and the tokens and bytes that were scored."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "length", "metric", "value", "low", "high", "seeds", "tokens", "bytes", "refused"])
        for name in self.names:
            for length in self.lengths:
                cell, seeds = self.cell(name, length), self.seeds(name, length)
                counts = [seeds[0].scored, sum(seeds[0].bytes)] if seeds else [0, 0]
                writer.writerow(
                    [name, length, self.metric, cell.value, *cell.interval, len(seeds), *counts, cell.refused or ""]
                )
        return out.getvalue()

    def json(self) -> str:
        """Everything, so that the same table can be made again, and where it comes from."""
        cells: list[dict[str, Any]] = [
            {"model": name, "length": n, "value": cell.value, "interval": list(cell.interval), "refused": cell.refused}
            for name in self.names
            for n in self.lengths
            for cell in [self.cell(name, n)]
        ]
        holds = {name: held._asdict() for name in self.names if (held := self.holds(name)) is not None}
        scores = [score.as_json() for score in self.scores]
        whole = {"metric": self.metric, "cells": cells, "holds": holds, "scores": scores, "born": origin()}
        return json_text(whole)


def rise_figure(table: LengthTable, *, train_length: int, metric: str = "perplexity") -> "Figure":
    """How many times its value at the training length each row has at the longer ones, on the same tokens.

    A line per row with its paired interval: what makes a text easy or hard at every length cancels. A bar whose lower
    end is no multiple, as of seeds that differ much, leaves the figure below.
    """
    from lengthwise.views.line_plot import Line, lines_figure

    lines = []
    for name in table.names:
        known = []
        for length in table.lengths:
            if length >= train_length and table.seeds(name, length) and table.seeds(name, train_length):
                value, interval = table.rise(name, length, train_length)
                known.append((length, 1 + value, *(1 + end for end in interval)))
        if known:
            lines.append(Line(name, *map(list, zip(*known, strict=True))))
    return lines_figure(
        lines,
        title=f"{metric.capitalize()} as a multiple of that at {train_length:,} tokens, same tokens, 95 % intervals",
        across="length in tokens",
        up=f"times the {metric} at {train_length:,}",
        marked=train_length,
        whole_bars=True,
    )


def control_figure(table: LengthTable, controls: Mapping[str, str], *, train_length: int | None = None) -> "Figure":
    """How many times the value of its control each row has at every length, on the same tokens: paired intervals."""
    from lengthwise.views.line_plot import Line, lines_figure

    lines = []
    for name, control in controls.items():
        known = []
        for length in table.lengths:
            if table.seeds(name, length) and table.seeds(control, length):
                value, interval = table.difference(name, control, length)
                base = table.cell(control, length).value
                known.append((length, *(_multiple(table.metric, x, base) for x in (value, *interval))))
        if known:
            lines.append(Line(name, *map(list, zip(*known, strict=True))))
    metric = METRIC_NAMES[table.metric]
    return lines_figure(
        lines,
        title=f"{metric.capitalize()} as a multiple of the control's, same tokens, 95 % intervals",
        across="length in tokens",
        up=f"times the {metric} of a window of the training length",
        marked=train_length,
        whole_bars=True,
    )


def _multiple(metric: str, difference: float, base: float) -> float:
    """How many times the base a value is that differs by so many nats per token, or bits per byte."""
    return 1 + difference / base if metric == "bits_per_byte" else math.exp(difference)


def has_bars(table: LengthTable, name: str) -> bool:
    """Whether `length_figure` draws the intervals of a row: those over seeds, or of a row that is alone.

    Intervals over documents tell how documents differ, which is the same for all rows, and would hide their lines.
    """
    return len(table.names) == 1 or all(len(table.seeds(name, n)) != 1 for n in table.lengths)


def length_figure(table: LengthTable, *, train_length: int | None = None) -> "Figure":
    """A line per row of the table, with its interval where `has_bars`; the training length marked."""
    from lengthwise.views.line_plot import Line, lines_figure  # late, as below: matplotlib is not needed for a table

    lines = []
    for name in table.names:
        known = [(n, table.cell(name, n)) for n in table.lengths if table.seeds(name, n)]
        if known:
            values = [n for n, _ in known], [cell.value for _, cell in known]
            ends = list(zip(*(cell.interval for _, cell in known), strict=True)) if has_bars(table, name) else []
            lines.append(Line(name, *values, *ends))
    protocol = table.scores[0].protocol.partition(":")[0]
    bars = ", with 95 % intervals" if any(line.low is not None for line in lines) else ""
    title = f"{METRIC_NAMES[table.metric].capitalize()} against length, protocol {protocol}{bars}"
    return lines_figure(
        lines, title=title, across="length in tokens", up=METRIC_NAMES[table.metric], marked=train_length
    )


def position_figure(table: LengthTable, length: int, *, train_length: int | None = None) -> "Figure":
    """The mean loss by place in a window of one length, a line per row (its first seed)."""
    from lengthwise.views.line_plot import Line, lines_figure

    lines = []
    for name in table.names:
        if seeds := table.seeds(name, length):
            lines.append(Line(name, [p for p, _ in seeds[0].positions], [v for _, v in seeds[0].positions]))
    return lines_figure(
        lines,
        title=f"Loss by position in windows of {length:,} tokens",
        across="position in the window",
        up="loss (nats per token)",
        marked=train_length,
        log=False,
        lengths=False,
    )


def format_value(value: float) -> str:
    """A value as a table shows it."""
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i == 0 else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    head, *rest = [[word.replace("|", r"\|") for word in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rest])


def _escaped(word: str) -> str:
    return "".join("\\" + letter if letter in "&%$#_{}" else letter for letter in word)
