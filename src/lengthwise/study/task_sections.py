"""The part of a report on tasks: which answers are right, by task, encoding and length."""

import math
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from lengthwise.evaluate.statistics import interval_words
from lengthwise.evaluate.tasks import task_notes
from lengthwise.study.results import StudyResults, TaskShare
from lengthwise.study.sections import Picture, Rows, Section
from lengthwise.views.heat_map import HeatMap, heat_maps_figure
from lengthwise.views.style import png


def task_sections(results: StudyResults) -> list[Section]:
    """Answers that are right as a whole, and how many of their tokens are, by task, encoding and length."""
    shares = results.task_shares()
    if not shares:
        return []
    over = interval_words(
        (len(share.counts) if share.over_seeds else 1 for share in shares), single="examples, Wilson's"
    )
    whole = f"Exact match: the share of whole answers that are right, over all depths, with 95 % intervals {over}."
    tokens = (
        "Share of the answers' tokens that are right, each predicted after the right ones before it (teacher forcing), "
        "over all depths and seeds. "
        "Guessing gives 4 % of letters, 10 % of digits and 50 % of parity's bits."
    )
    figure = Picture(png(task_figure(shares)), tokens, "tasks")
    return [
        Section("Tasks", [whole, *task_notes(results.tasks)], task_rows(shares, _whole_cell)),
        Section("Tasks by token", [tokens], task_rows(shares, _token_cell), [figure]),
    ]


def task_rows(shares: Sequence[TaskShare], cell: Callable[[TaskShare], str]) -> Rows:
    """A line per task and encoding, a column per length."""
    lengths = sorted({share.length for share in shares})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for share in shares:
        lines.setdefault((share.task, share.encoding), {})[share.length] = "-" if share.refused else cell(share)
    head = ["task", "encoding", *(f"{length:,}" for length in lengths)]
    return [head, *([*line, *(cells.get(n, "-") for n in lengths)] for line, cells in lines.items())]


def _whole_cell(share: TaskShare) -> str:
    return f"{share.share:.0%} ({share.interval.text('{:.0%}'.format)})"


def _token_cell(share: TaskShare) -> str:
    return f"{share.tokens:.0%}"


def task_figure(shares: Sequence[TaskShare]) -> Figure:
    """The share of right tokens: a panel a task, a row an encoding, a column a length."""
    encodings, lengths = list(dict.fromkeys(s.encoding for s in shares)), sorted({s.length for s in shares})
    panels = []
    for task in dict.fromkeys(share.task for share in shares):
        tokens = {(s.encoding, s.length): s.tokens for s in shares if s.task == task}
        values = [[tokens.get((encoding, n), math.nan) for n in lengths] for encoding in encodings]
        panels.append(HeatMap(task, [f"{n:,}" for n in lengths], encodings, values))
    return heat_maps_figure(
        panels, title="Share of the answers' tokens that are right", across="length in tokens", up=""
    )
