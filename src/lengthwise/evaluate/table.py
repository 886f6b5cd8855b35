"""Scores as a table: a row a model (or several seeds of it), a column a length; text, Markdown, LaTeX, CSV, JSON.

The figure is perplexity. Perplexities of different tokenizers count different tokens and cannot be compared, so with
more than one tokenizer the table has bits per byte, and says why.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lengthwise.evaluate.score import Score
from lengthwise.evaluate.statistics import Interval, bootstrap, paired_difference

Metric = Literal["perplexity", "bits_per_byte"]
WORDS = {"perplexity": "perplexity", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Cell:
    """One figure with its interval, or the reason why there is none."""

    value: float
    interval: Interval
    refused: str | None = None

    def __str__(self) -> str:
        return "-" if self.refused else figure(self.value)


class LengthTable:
    """Rows by name, columns by length."""

    def __init__(self, scores: Sequence[Score], *, rows: Mapping[str, str] | None = None) -> None:
        """`rows` gives the row of a model's name where several are seeds of one; else each has its own."""
        if not scores:
            raise ValueError("a table needs a score at least; none came. Measure a model.")
        self.scores = list(scores)
        self.lengths = sorted({score.length for score in scores})
        self._cells: dict[str, dict[int, list[Score]]] = {}
        for score in scores:
            row = (rows or {}).get(score.name, score.name)
            column = self._cells.setdefault(row, {}).setdefault(score.length, [])
            if any(other.name == score.name for other in column):
                raise ValueError(
                    f"names must differ in one table; {score.name!r} came twice at length {score.length}. Rename one."
                )
            column.append(score)
        mixed = len({score.tokenizer for score in scores}) > 1
        self.metric: Metric = "bits_per_byte" if mixed else "perplexity"

    @property
    def names(self) -> list[str]:
        """The rows, as they came."""
        return list(self._cells)

    def seeds(self, name: str, length: int) -> list[Score]:
        """The scores behind a cell that were not refused."""
        return [score for score in self._cells[name].get(length, []) if not score.refused]

    def cell(self, name: str, length: int) -> Cell:
        """The mean over seeds, with an interval over documents and seeds."""
        seeds = self.seeds(name, length)
        if not seeds:
            reasons = [score.refused for score in self._cells[name].get(length, []) if score.refused]
            return Cell(math.nan, Interval(math.nan, math.nan), reasons[0] if reasons else "not measured")
        sums = [score.sums(self.metric) for score in seeds]
        value = float(np.mean([above.sum() / below.sum() for above, below in sums]))
        interval = bootstrap(sums)
        if self.metric == "perplexity":
            return Cell(math.exp(min(value, 700)), Interval(*(math.exp(min(end, 700)) for end in interval)))
        return Cell(value, interval)

    def difference(self, name: str, other: str, length: int) -> tuple[float, Interval]:
        """How much more one costs than another on the same tokens: nats per token, or bits per byte."""
        return self._paired(
            self.seeds(name, length),
            self.seeds(other, length),
            f"a paired difference needs {name!r} and {other!r} on the same tokens at {length:,}; they were not. "
            "Measure both in one go, with one tokenizer.",
        )

    def change(self, name: str, length: int, since: int) -> tuple[float, Interval]:
        """How much more one costs at a length than at another on the same tokens: nats per token, or bits per byte."""
        return self._paired(
            self.seeds(name, length),
            self.seeds(name, since),
            f"a paired change needs {name!r} on the same tokens at {length:,} and {since:,}; it was not measured so. "
            "Use the protocol fair.",
        )

    def _paired(self, first: list[Score], second: list[Score], otherwise: str) -> tuple[float, Interval]:
        """First less second, or an error in these words where they did not score the same tokens."""
        if not first or not second or len({score.targets for score in (*first, *second)}) != 1:
            raise ValueError(otherwise)
        return paired_difference(*([score.sums(self.metric) for score in scores] for scores in (first, second)))

    def notes(self) -> list[str]:
        """Protocol, text, tokens scored, and what is missing and why."""
        protocols = dict.fromkeys(score.protocol for score in self.scores)
        sources = dict.fromkeys(score.source for score in self.scores)
        counts = {score.scored for score in self.scores if not score.refused}
        scored = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)})) if counts else "no"
        found = [
            f"{WORDS[self.metric]}; {'; '.join(protocols)}",
            f"text: {', '.join(sources)}; {scored} tokens scored",
        ]
        if self.metric == "bits_per_byte":
            found.append("bits per byte only: the models have different tokenizers, and perplexity counts tokens")
        for name in self.names:
            for length in self.lengths:
                if reason := self.cell(name, length).refused:
                    found.append(f"{name} at {length:,}: {reason}")
        return found

    def rows(self) -> list[list[str]]:
        """A heading and a line a row, as words."""
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
        """A line a cell, with the interval and what was scored."""
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
        """Everything, from which the same table can be made again."""
        cells: list[dict[str, Any]] = [
            {"model": name, "length": n, "value": cell.value, "interval": list(cell.interval), "refused": cell.refused}
            for name in self.names
            for n in self.lengths
            for cell in [self.cell(name, n)]
        ]
        whole = {"metric": self.metric, "cells": cells, "scores": [score.as_json() for score in self.scores]}
        return json.dumps(_finite(whole), indent=1)


def figure(value: float) -> str:
    """A number as a table shows it."""
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


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
