"""The whole measurement: several models, all lengths and tasks, and the files that tell of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lengthwise.data import documents
from lengthwise.evaluate.figures import length_figure, position_figure
from lengthwise.evaluate.perplexity import checked_lengths, score_lengths
from lengthwise.evaluate.score import Score
from lengthwise.evaluate.subjects import Subject, check_names, load_subject, scaled_subjects
from lengthwise.evaluate.table import LengthTable, aligned
from lengthwise.evaluate.task_scores import TaskScore, score_task, task_rows
from lengthwise.evaluate.text import Text, read_text
from lengthwise.evaluate.windows import Protocol
from lengthwise.runs import Run
from lengthwise.views.style import save_picture

TEXT_TOKENS = 2**20
"""Tokens read of a text, unless the windows need more."""


@dataclass(frozen=True)
class Measure:
    """What is measured of every model."""

    lengths: list[int] = field(default_factory=lambda: [128, 256, 512, 1024])
    """lengths in tokens"""
    protocol: Protocol = "fair"
    """fair: the same tokens at every length; paper: consecutive windows; sliding: every token once"""
    text: str = "stdlib"
    """held-out text: a source, as for training"""
    windows: int = 256
    """windows at most, at each length"""
    stride: int | None = None
    """tokens scored in a window (fair: a quarter of the shortest length; sliding: half of the length)"""
    chunk: int | None = None
    """read windows in chunks of so many tokens through the cache (by itself where memory asks for it)"""
    rope: list[str] = field(default_factory=list)
    """scalings such as yarn:8 switched on for models with RoPE, as rows of their own"""
    tasks: list[str] = field(default_factory=list)
    """synthetic tasks to score at every length"""
    examples: int = 100
    """examples of each task, length and depth"""


@dataclass(frozen=True)
class Measurement:
    """The table, the scores of tasks, and the training length that is marked."""

    table: LengthTable
    tasks: list[TaskScore]
    train_length: int | None

    def text(self) -> str:
        """For a terminal."""
        return self.table.text() + (f"\n\n{aligned(task_rows(self.tasks))}" if self.tasks else "")

    def write(self, folder: Path) -> list[Path]:
        """JSON, CSV, Markdown, LaTeX and the figures."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "scores.json": self.table.json(),
            "scores.csv": self.table.csv(),
            "scores.md": self.table.markdown(),
            "scores.tex": self.table.latex(),
        }
        if self.tasks:
            texts["tasks.json"] = json.dumps([score.as_json() for score in self.tasks], indent=1)
        for name, content in texts.items():
            (folder / name).write_text(content.rstrip("\n") + "\n", encoding="utf-8")
        pictures = {
            "lengths.png": length_figure(self.table, train_length=self.train_length),
            "positions.png": position_figure(self.table, self.table.lengths[-1], train_length=self.train_length),
        }
        drawn = [save_picture(picture, folder / name, force=True) for name, picture in pictures.items()]
        return [*(folder / name for name in texts), *drawn]


def measure(sources: Sequence[str], what: Measure, *, device: str = "auto") -> Measurement:
    """Load, measure and compare runs, checkpoints and names on the hub; NAME=SOURCE gives one a name."""
    named = [_named(source) for source in sources]
    check_names([name for name, _ in named])
    checked_lengths(what.lengths)
    scores: list[Score] = []
    tasks: list[TaskScore] = []
    lengths = set()
    for name, source in named:
        subject = load_subject(source, name=name, device=device)
        lengths.add(subject.length)
        scores += score_subject(subject, what)
        for task in what.tasks:
            tasks += score_task(subject.model, subject.tokenizer, task, what.lengths, name=name, count=what.examples)
    return Measurement(LengthTable(scores), tasks, lengths.pop() if len(lengths) == 1 else None)


def score_subject(subject: Subject, what: Measure) -> list[Score]:
    """The subject at every length, and again under every scaling of its RoPE."""
    text = held_out_text(subject, what)
    return [
        score
        for one in scaled_subjects(subject, what.rope)
        for score in score_lengths(
            one.model,
            text,
            what.lengths,
            name=one.name,
            tokenizer=one.vocabulary,
            protocol=what.protocol,
            windows=what.windows,
            stride=what.stride,
            chunk=what.chunk,
        )
    ]


def held_out_text(subject: Subject, what: Measure) -> Text:
    """As much of the text as the windows can use, in the subject's tokens."""
    limit = max(TEXT_TOKENS, what.windows * max(what.lengths) + 1)
    return read_text(documents(what.text, "held-out"), subject.tokenizer, source=what.text, limit=limit)


def _named(source: str) -> tuple[str, str]:
    name, sign, path = source.partition("=")
    if sign and not Path(source).exists():
        return name, path
    return (Run(source).name if Run.is_run(source) else Path(source).name), source
