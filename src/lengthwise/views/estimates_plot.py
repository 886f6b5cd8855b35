"""Shares that rose or fell, one a row and in order: the value of each seed and the interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lengthwise.views.line_plot import COLOURS
from lengthwise.views.style import GREY, LARGE, SMALL, axes_at, new_figure, write

WIDTH, ROW, LEFT, RIGHT, TOP, BELOW = 4.4, 0.155, 1.15, 0.2, 0.36, 0.3
"""In inches; ROW is the height of a row."""
STRAIGHT = 0.01
"""Up to this share the axis is straight, beyond it logarithmic."""
TICKS = (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


@dataclass(frozen=True)
class Estimate:
    """A row: 0.02 is a rise of 2 %."""

    name: str
    values: Sequence[float]
    interval: tuple[float, float]


def estimates_figure(estimates: Sequence[Estimate], *, title: str) -> Figure:
    """The least on top."""
    rows = sorted(estimates, key=lambda row: sum(row.values) / len(row.values))
    figure = new_figure(LEFT + WIDTH + RIGHT, TOP + ROW * len(rows) + BELOW)
    write(figure, 0.06, 0.06, title, LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, ROW * len(rows))
    axes.set_xscale("symlog", linthresh=STRAIGHT)
    for place, row in enumerate(rows):
        axes.hlines(place, *row.interval, color=COLOURS[0], linewidth=1.6, alpha=0.45)
        axes.plot(row.values, [place] * len(row.values), "o", color=COLOURS[0], markersize=2.6, markeredgewidth=0)
    ends = [end for row in rows for end in (*row.interval, *row.values, 0.0)]
    axes.set_xticks([tick for tick in TICKS if min(ends) <= tick <= max(ends)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+,.0%}" if x else "0"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.axvline(0, color=GREY, linewidth=0.7, zorder=0)
    axes.grid(axis="x", color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, length=2, width=0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
