"""Results against length, step or position: a line per model with its interval, and the training length marked."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lengthwise.views.style import GREY, LARGE, MIDDLE, SMALL, axes_at, new_figure, write

WIDTH, HEIGHT, LEFT, TOP, BELOW, KEY = 4.2, 2.9, 0.6, 0.42, 0.5, 1.35
MARK, LETTER = 0.4, 0.056
"""Inches that a line's mark in the key takes, and a letter of its name."""
# Okabe and Ito's colours, which colour-blind readers can tell apart; beyond eight lines the dashes differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^Dvphx"
APART = 0.03


@dataclass(frozen=True)
class Line:
    """A model's values, in order, and their intervals if these are known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines_figure(
    lines: Sequence[Line],
    *,
    title: str,
    across: str,
    up: str,
    marked: int | None = None,
    log: bool = True,
    lengths: bool = True,
    whole_bars: bool = False,
) -> Figure:
    """Lines with their intervals; `marked` is the training length, `lengths` gives x a tick at each value.

    With `whole_bars` the intervals decide the height of the figure too, as paired ones should.
    """
    if not lines:
        raise ValueError("a figure must have at least one line, got none")
    key = max(KEY, MARK + LETTER * max(len(line.name) for line in lines))
    figure = new_figure(LEFT + WIDTH + key, TOP + HEIGHT + BELOW)
    write(figure, 0.06, 0.06, title, LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, HEIGHT)
    for place, line in enumerate(lines):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        marker = MARKERS[place % len(MARKERS)] if lengths else None
        axes.plot(line.x, line.y, dash, color=colour, marker=marker, markersize=3, linewidth=1.1, label=line.name)
    if log:
        axes.set_yscale("log")
    # A text that is hard for all models widens every interval alike: the lines fill the figure, bars can leave it.
    if not whole_bars:
        axes.set_ylim(axes.get_ylim())
    for place, line in enumerate(lines):
        if line.low is not None and line.high is not None:
            # Beside one another, a few hundredths of a doubling apart.
            beside = 2 ** (APART * (place - (len(lines) - 1) / 2)) if lengths else 1.0
            colour = COLOURS[place % len(COLOURS)]
            axes.vlines([beside * x for x in line.x], line.low, line.high, color=colour, alpha=0.45, linewidth=0.8)
    if marked is not None:
        axes.axvline(marked, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "trained at",
            (marked, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            size=SMALL,
            color=GREY,
            va="top",
        )
    if log:
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.yaxis.set_minor_formatter(FuncFormatter(_plain))
    if lengths:
        axes.set_xscale("log", base=2)
        places = sorted({x for line in lines for x in line.x})
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(across, size=MIDDLE)
    axes.set_ylabel(up, size=MIDDLE)
    axes.tick_params(which="both", labelsize=SMALL, length=2, width=0.5)
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SMALL + 0.5, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _plain(value: float, place: int) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
