"""How heads moved in training: a panel per head, mean against distance, a line per step."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lengthwise.views.figures import checked_heads, label
from lengthwise.views.maps import LayerMaps
from lengthwise.views.style import GREY, LARGE, MIDDLE, SMALL, axes_at, new_figure, ticks, wrapped, write

ACROSS = 4
WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW = 1.3, 1.0, 0.5, 0.06, 0.24, 0.2
"""A panel in inches, and the space around it."""

TOP, BOTTOM, KEY = 0.2, 0.3, 0.75
"""Space for the title, for labels and the note, and for the legend beside the panels."""

LINES = 7
"""How many steps are drawn at most."""


def step_plot(snapshots: Mapping[int, LayerMaps], *, heads: Sequence[int] | None = None) -> Figure:
    """Snapshots of one layer by their steps; of many, those that stand at even ratios of one another."""
    steps = chosen_steps(sorted(snapshots))
    if len(steps) < 2:
        raise ValueError(
            f"how heads moved needs two snapshots of a run or more, got {len(steps)}; train with --maps-every"
        )
    maps = snapshots[steps[-1]]
    (last,) = maps.maps
    shown = checked_heads(heads, last.heads)
    across = min(ACROSS, len(shown))
    width, height = LEFT + WIDTH + RIGHT, ABOVE + HEIGHT + BELOW
    panels = -(-len(shown) // across) * height
    room = across * width + KEY - 0.12
    title, further = wrapped(f"{maps.title}, by distance, at {len(steps)} steps of training", room, LARGE)
    note, below = wrapped(f"each panel in a range of its own; {_averaged(list(snapshots.values()))}", room, SMALL)
    top = TOP + further
    figure = new_figure(across * width + KEY, top + panels + BOTTOM + below)
    write(figure, 0.06, 0.06, title, LARGE)
    colours = matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, len(steps)))
    for place, head in enumerate(shown):
        row, column = divmod(place, across)
        axes = axes_at(figure, column * width + LEFT, top + row * height + ABOVE, WIDTH, HEIGHT)
        for step, colour in zip(steps, colours, strict=True):
            profile = snapshots[step].maps[0].profile
            axes.plot(profile.distances, profile.mean[head], color=colour, linewidth=0.7, label=f"{step:,}")
        axes.axhline(0, color=GREY, linewidth=0.4, zorder=0)
        axes.set_title(f"Head {head + 1}", size=MIDDLE, pad=3)
        if last.causal:
            axes.set_xticks(ticks(last.queries))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.tick_params(labelsize=SMALL, length=2, width=0.5, pad=1.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_linewidth(0.5)
        if column == 0:
            axes.set_ylabel(label(maps), size=SMALL, labelpad=1)
        if place + across >= len(shown):
            axes.set_xlabel("distance (query \N{MINUS SIGN} key)", size=SMALL, labelpad=1)
        if place == across - 1:
            axes.legend(
                title="step",
                title_fontsize=SMALL,
                fontsize=SMALL,
                loc="upper left",
                bbox_to_anchor=(1.02, 1.1),
                frameon=False,
                labelspacing=0.35,
                handlelength=1.2,
            )
    write(figure, 0.06, top + panels + BOTTOM - 0.14, note, SMALL, GREY)
    return figure


def _averaged(snapshots: Sequence[LayerMaps]) -> str:
    """What one number for a distance is the mean of."""
    if not any(maps.diagonal_spread.any() for maps in snapshots):
        return "the distance alone decides"
    mean = "the mean over all pairs of a distance"
    moved = torch.cat([maps.context_dependence for maps in snapshots])
    if moved.isnan().any():
        return mean
    return f"{mean}, which {'the tokens move' if moved.any() else 'depends on the position too'}"


def chosen_steps(steps: Sequence[int]) -> list[int]:
    """The first, the last, and those between that come nearest to even ratios: heads move most at first.

    >>> chosen_steps(range(100, 6500, 100))
    [100, 200, 400, 800, 1600, 3200, 6400]
    """
    if len(steps) <= LINES:
        return list(steps)
    first, last = (math.log(max(1, steps[place])) for place in (0, -1))
    wanted = [math.exp(first + (last - first) * place / (LINES - 1)) for place in range(LINES)]
    return sorted({min(steps, key=lambda step: abs(step - target)) for target in wanted})
