"""Results against length, step or position: a line per model with its interval, and the training length marked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from lengthwise.views.style import GREY, LARGE, MIDDLE, SMALL, axes_at, new_figure, write

WIDTH, HEIGHT, LEFT, TOP, BELOW, KEY = 4.2, 2.9, 0.6, 0.42, 0.5, 1.35
MARK, LETTER = 0.4, 0.056
"""Inches that a line's mark in the key takes, and a letter of its name."""
# Okabe and Ito's colours, which colour-blind readers can tell apart; beyond eight lines the dashes differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")
DASHES = ("-", "--")
MARKERS = "os^Dvphx"
KEYED = 12
"""Of more lines than that each has its name at its end, in the order in which they end, and there is no key."""
ROW = 0.125
"""The least height of such a name, in inches."""
LABEL = 0.095
"""The least distance of two labels of the vertical axis, in inches."""
DIGITS = (range(1, 10), (1, 2, 3, 5), (1, 3), (1,))
"""Which multiples of powers of ten a logarithmic axis labels: the first of these that has room."""
APART, SPREAD = 0.03, 0.24
"""How far lines with bars stand apart at one length, and the first from the last at most, as a part of a doubling."""


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

    With `whole_bars` the intervals decide the height of the figure too, as paired ones should, and so they do where
    there is one length alone and no line to follow.
    """
    if not lines:
        raise ValueError("a figure must have at least one line, got none")
    many = len(lines) > KEYED
    if many:
        lines = _in_order(lines)
    places = sorted({x for line in lines for x in line.x})
    is_whole = [line.x[-1] == places[-1] for line in lines]
    lines = _side_by_side(lines) if lengths else lines
    height = max(HEIGHT, ROW * len(lines)) if many else HEIGHT
    key = max(KEY, MARK + LETTER * max(len(line.name) for line in lines))
    figure = new_figure(LEFT + WIDTH + key, TOP + height + BELOW)
    write(figure, 0.06, 0.06, title, LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, height)
    for place, line in enumerate(lines):
        colour, dash = COLOURS[place % len(COLOURS)], "-" if many else DASHES[place // len(COLOURS)]
        marker = MARKERS[place % len(MARKERS)] if lengths else None
        axes.plot(line.x, line.y, dash, color=colour, marker=marker, markersize=3, linewidth=1.1, label=line.name)
    if log:
        axes.set_yscale("log")
    # A text that is hard for all models widens every interval alike: the lines fill the figure, bars can leave it.
    if not (whole_bars or (lengths and len(places) == 1)):
        axes.set_ylim(axes.get_ylim())
    for place, line in enumerate(lines):
        if line.low is not None and line.high is not None:
            colour = COLOURS[place % len(COLOURS)]
            axes.vlines(line.x, line.low, line.high, color=colour, alpha=0.45, linewidth=0.8)
    if marked is not None:
        axes.axvline(marked, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "trained at",
            (marked, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            size=SMALL,
            color=GREY,
            ha="center",
            va="bottom",
        )
    if log:
        ends = axes.get_ylim()
        axes.set_yticks(shown := _log_ticks(*ends, height), list(map(_exact, shown)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(ends)
    if lengths:
        axes.set_xscale("log", base=2)
        first, last = (end((*places, marked or places[0])) for end in (min, max))
        if first == last:  # else the little that lines stand apart would fill the figure
            axes.set_xlim(first / 2, 2 * last)
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(across, size=MIDDLE)
    axes.set_ylabel(up, size=MIDDLE)
    axes.tick_params(which="both", labelsize=SMALL, length=2, width=0.5)
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if many:
        _name_ends(axes, lines, is_whole, height)
    else:
        axes.legend(fontsize=SMALL + 0.5, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _side_by_side(lines: Sequence[Line]) -> list[Line]:
    """Each a few hundredths of a doubling beside the last, if any has bars, which would hide one another."""
    if all(line.low is None for line in lines):
        return list(lines)
    apart, middle = min(APART, SPREAD / max(1, len(lines) - 1)), (len(lines) - 1) / 2
    moves = [2 ** (apart * (place - middle)) for place in range(len(lines))]
    return [replace(line, x=[move * x for x in line.x]) for move, line in zip(moves, lines, strict=True)]


def _in_order(lines: Sequence[Line]) -> list[Line]:
    """As they end, the greatest first; then those that end before the others, with where they end in the name."""
    last = max(line.x[-1] for line in lines)
    named = [line if line.x[-1] == last else replace(line, name=f"{line.name}, to {line.x[-1]:,.0f}") for line in lines]
    return sorted(named, key=lambda line: (line.x[-1], line.y[-1]), reverse=True)


def _name_ends(axes: Axes, lines: Sequence[Line], is_whole: Sequence[bool], height: float) -> None:
    """The name of each line at the right, as near to its end as the others allow, and a thin line between the two.

    The names of lines that end before the others stand at the bottom, with no thin line.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # no more scaling: the ends stay where they are
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [tuple(map(float, to_axes.transform((line.x[-1], line.y[-1])))) for line in lines]
    wanted = [
        (up if math.isfinite(up) else 1.0) if whole else 0.0 for (_, up), whole in zip(ends, is_whole, strict=True)
    ]
    for place, label in enumerate(_spread(wanted, ROW / height)):
        colour, right = COLOURS[place % len(COLOURS)], axes.transAxes
        name = axes.text(1.1, label, lines[place].name, color=colour, size=SMALL + 0.5, va="center", transform=right)
        name.set_parse_math(False)
        if is_whole[place]:
            x, y = [ends[place][0], 1.02, 1.09], [wanted[place], wanted[place], label]
            axes.add_line(Line2D(x, y, color=colour, linewidth=0.5, alpha=0.6, transform=right, clip_on=False))


def _spread(places: Sequence[float], apart: float) -> list[float]:
    """Falling places between 0 and 1, moved as little as it takes to stand apart.

    >>> _spread([0.9, 0.5, 0.5, 0.0], 0.2)
    [0.9, 0.6, 0.4, 0.0]
    """
    groups: list[list[float]] = []  # those of a group stand side by side, about their mean
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _top(groups[-1], apart) > _top(groups[-2], apart) - apart * len(groups[-2]) + 1e-9:
            last = groups.pop()
            groups[-1] += last
    return [round(_top(group, apart) - apart * number, 9) for group in groups for number in range(len(group))]


def _top(group: Sequence[float], apart: float) -> float:
    """Where the first of a group stands, so that all of them are between 0 and 1."""
    length = apart * (len(group) - 1)
    return min(max(sum(group) / len(group) + length / 2, length), 1.0)


def _log_ticks(low: float, high: float, height: float) -> list[float]:
    """Round values on a logarithmic axis of so many inches, as many as have room; even steps in a narrow range.

    >>> _log_ticks(1.9, 11, 3), _log_ticks(1.9, 41, 0.5), _log_ticks(9.7, 10.4, 3)
    ([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], [3.0, 10.0, 30.0], [9.8, 10.0, 10.2, 10.4])
    """
    powers = [float(f"1e{power}") for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    rounds = [[digit * power for power in powers for digit in digits] for digits in DIGITS]
    rounds += [powers[:: 2**step] for step in range(1, 8)]
    apart = LABEL / height * (math.log(high) - math.log(low))
    for values in rounds:
        inside = [value for value in values if low <= value <= high]
        if len(inside) < 3:
            break
        if all(math.log(right) - math.log(left) >= apart for left, right in pairwise(inside)):
            return inside
    even = [float(f"{value:.12g}") for value in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)]
    return [value for value in even if low <= value <= high]


def _exact(value: float) -> str:
    """With all the digits that it has: ticks are round, and two of them never look alike.

    >>> _exact(10), _exact(10.25), _exact(2000), _exact(3e7)
    ('10', '10.25', '2,000', '3e7')
    """
    if 1e-4 <= value < 1e6:
        return f"{value:,.10f}".rstrip("0").rstrip(".")
    digits, exponent = f"{value:.11e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
