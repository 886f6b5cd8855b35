"""Shares that rose or fell, one a row and in order: the value of each seed and the interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lengthwise.views.line_plot import COLOURS, LETTER
from lengthwise.views.style import GREY, LARGE, SMALL, axes_at, new_figure, write

WIDTH, ROW, LEFT, RIGHT, TOP, BELOW = 4.4, 0.155, 1.15, 0.2, 0.36, 0.3
"""In inches; ROW is the height of a row."""
STRAIGHT = 0.01
"""Up to this share the axis is straight, beyond it logarithmic."""
TICKS = (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
FEWER_TICKS = (-0.1, -0.01, 0, 0.01, 0.1, 1, 10, 100)
"""Where those above have no room."""
NOT_JUDGED = "0.55"
"""The grey of rows that are not to be compared."""


@dataclass(frozen=True)
class Estimate:
    """A row: 0.02 is a rise of 2 %. One that is not `judged` is grey and hollow."""

    name: str
    values: Sequence[float]
    interval: tuple[float, float]
    judged: bool = True


def estimates_figure(estimates: Sequence[Estimate], *, title: str) -> Figure:
    """The least on top; where rows are grey, a line says why."""
    rows = sorted(estimates, key=lambda row: sum(row.values) / len(row.values))
    figure = new_figure(LEFT + WIDTH + RIGHT, TOP + ROW * len(rows) + BELOW)
    write(figure, 0.06, 0.06, title, LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, ROW * len(rows))
    axes.set_xscale("symlog", linthresh=STRAIGHT)
    for place, row in enumerate(rows):
        colour, inside = (COLOURS[0], COLOURS[0]) if row.judged else (NOT_JUDGED, "white")
        axes.hlines(place, *row.interval, color=colour, linewidth=1.6, alpha=0.45)
        points = axes.plot(row.values, [place] * len(row.values), "o", color=colour, markersize=2.6)
        points[0].set(markerfacecolor=inside, markeredgewidth=0 if row.judged else 0.6)
    ends = [end for row in rows for end in (*row.interval, *row.values, 0.0) if math.isfinite(end)]
    axes.set_xlim(axes.get_xlim())
    shown, fewer = ([tick for tick in some if min(ends) <= tick <= max(ends)] for some in (TICKS, FEWER_TICKS))
    axes.set_xticks(shown if _have_room(axes, shown) else fewer)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _label(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(0, color=GREY, linewidth=0.7, zorder=0)
    axes.grid(axis="x", color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, length=2, width=0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color("black" if row.judged else NOT_JUDGED)
    if not all(row.judged for row in rows):
        words = "grey: under-trained, not to be judged"
        axes.text(1, 1, words, color=NOT_JUDGED, size=SMALL, ha="right", va="bottom", transform=axes.transAxes)
    return figure


def _label(share: float) -> str:
    return f"{share:+,.0%}" if share else "0"


def _have_room(axes: Axes, ticks: Sequence[float]) -> bool:
    """Whether the labels of all ticks fit beside one another, with a letter between them."""
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [WIDTH * float(to_axes.transform((tick, 0))[0]) for tick in ticks]
    widths = [LETTER * (len(_label(tick)) + 1) for tick in ticks]
    gaps = [right - left for left, right in pairwise(places)]
    return all(gap >= (left + right) / 2 for gap, (left, right) in zip(gaps, pairwise(widths), strict=True))
