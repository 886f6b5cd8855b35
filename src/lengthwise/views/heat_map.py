"""Shares from 0 to 1 by two things at once, such as length and depth: one panel for each of several models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from lengthwise.views.style import GREY, LARGE, MIDDLE, SMALL, ColourScale, axes_at, new_figure, write

CELL, LEFT, TOP, GAP, HEAD, BELOW, PER_ROW = (0.46, 0.26), 0.62, 0.42, 0.5, 0.24, 0.36, 3
LETTER = 0.056
"""Inches that a letter of a row's name takes."""


@dataclass(frozen=True)
class HeatMap:
    """One panel: `values` by row and column, NaN where nothing was measured."""

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]


def heat_maps_figure(panels: Sequence[HeatMap], *, title: str, across: str, up: str) -> Figure:
    """Panels in rows of three, every cell with its value in percent; rows that all panels share are named once."""
    if not panels:
        raise ValueError("a figure must have at least one panel, got none")
    scale = ColourScale(matplotlib.colormaps["viridis"], Normalize(0, 1), "0.92")
    wide = CELL[0] * max(len(panel.columns) for panel in panels)
    high = CELL[1] * max(len(panel.rows) for panel in panels)
    across_count, down_count = min(PER_ROW, len(panels)), math.ceil(len(panels) / PER_ROW)
    names = LETTER * max(len(row) for panel in panels for row in panel.rows)
    shared = all(panel.rows == panels[0].rows for panel in panels)
    first, gap = max(LEFT, names + 0.3), GAP if shared else max(GAP, names + 0.2)
    width = max(first + across_count * (wide + gap), 4.5)
    figure = new_figure(width, TOP + down_count * (HEAD + high + BELOW))
    write(figure, 0.06, 0.06, title, LARGE)
    for place, panel in enumerate(panels):
        left = first + place % PER_ROW * (wide + gap)
        top = TOP + place // PER_ROW * (HEAD + high + BELOW) + HEAD
        write(figure, left, top - 0.17, panel.title, MIDDLE)
        axes = axes_at(figure, left, top, CELL[0] * len(panel.columns), CELL[1] * len(panel.rows))
        values = np.array(panel.values, dtype=float)
        axes.imshow(scale.paint(values), aspect="auto", interpolation="nearest")
        for row, column in np.ndindex(*values.shape):
            value = values[row, column]
            text, colour = (
                ("\N{EN DASH}", GREY) if math.isnan(value) else (f"{value:.0%}", "1.0" if value < 0.6 else "0.0")
            )
            axes.text(column, row, text, size=SMALL, color=colour, ha="center", va="center")
        axes.set_xticks(range(len(panel.columns)), panel.columns)
        is_named = not shared or place % PER_ROW == 0
        axes.set_yticks(range(len(panel.rows)), panel.rows if is_named else [""] * len(panel.rows))
        axes.tick_params(labelsize=SMALL, length=2, width=0.5)
        axes.spines[:].set_visible(False)
        if place % PER_ROW == 0:
            axes.set_ylabel(up, size=SMALL)
        if place // PER_ROW == down_count - 1:
            axes.set_xlabel(across, size=SMALL)
    return figure
