"""Mean against distance, a line per head: the one view in which encodings of every kind can be compared."""

from collections.abc import Sequence
from textwrap import fill

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lengthwise.views.canvas import GREY, LARGE, MIDDLE, SMALL, axes_at, new_figure, write
from lengthwise.views.canvas import colours as range_of
from lengthwise.views.grid import checked_heads, heading, panel
from lengthwise.views.maps import LayerMap, PositionMaps

WIDTH, HEIGHT, LEFT, TOP, BELOW, KEY = 2.9, 2.1, 0.62, 0.48, 0.42, 0.75
"""Inches: of a panel, of the room at its left, above and below it, and of the key beside it."""


def curves(
    maps: PositionMaps,
    *,
    heads: Sequence[int] | None = None,
    log: bool = False,
    spread: bool | None = None,
) -> Figure:
    """The only layer's heads against distance; beside them the kernels of rotary heads where they are known."""
    (one,) = maps.maps
    shown = checked_heads(heads, one.heads)
    panels = 1 if one.kernel is None else 2
    figure = new_figure(panels * (LEFT + WIDTH) + KEY, TOP + HEIGHT + BELOW)
    # Some 14 letters of this size go into an inch, and there is room for two lines.
    write(figure, 0.06, 0.06, fill(heading(maps, one), int(14 * figure.get_figwidth())), LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, HEIGHT)
    lines(axes, one, shown, spread=spread)
    finish(axes, label(maps), log=log)
    if one.kernel is not None:
        axes = axes_at(figure, 2 * LEFT + WIDTH, TOP, WIDTH, HEIGHT)
        plot(axes, np.arange(one.kernel.shape[1]), one.kernel, shown)
        finish(axes, "score of the mean query and key", log=log)
    axes.legend(fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, labelspacing=0.35)
    return figure


def compare(
    several: Sequence[PositionMaps], *, layer: int | None = None, heads: Sequence[int] | None = None, log: bool = False
) -> Figure:
    """Several models side by side, a column each: curves against distance on one scale, and below them a few maps.

    `layer` is the last of each if not given; `heads` are those whose maps are drawn, the first three by default.
    """
    if not several:
        raise ValueError("a comparison needs one model's maps at least; none came. Give a list of PositionMaps.")
    ones = [maps.only(layer).maps[0] for maps in several]
    mapped = all(one.described is not None or one.tiles is not None for one in ones)
    shown = checked_heads(
        range(min(3, min(o.heads for o in ones))) if heads is None else heads, min(o.heads for o in ones)
    )
    width, side = 2.3, 1.5
    rows = shown if mapped else []
    figure = new_figure(len(ones) * (LEFT + width), TOP + HEIGHT + BELOW + len(rows) * (side + 0.3))
    first: Axes | None = None
    for column, (maps, one) in enumerate(zip(several, ones, strict=True)):
        left = column * (LEFT + width) + LEFT
        axes = axes_at(figure, left, TOP, width - 0.15, HEIGHT)
        if first is not None and maps.what == several[0].what:
            axes.sharey(first)
        first = first or axes
        lines(axes, one, checked_heads(None, one.heads), spread=False)
        finish(axes, label(maps), log=log)
        axes.set_title(f"{maps.encoding}: {maps.what}", size=MIDDLE)
        for row, head in enumerate(rows):
            top = TOP + HEIGHT + BELOW + row * (side + 0.3) + 0.1
            image = one.pooled(256).mean[head].numpy()
            bar = axes_at(figure, left + side + 0.06, top, 0.06, side)
            place = axes_at(figure, left, top, side, side)
            panel(place, one, image, range_of(image, log=maps.what == "weights"), bar)
            place.set_ylabel(f"Head {head + 1}", size=SMALL, labelpad=1)
    write(figure, 0.06, 0.06, ", ".join(dict.fromkeys(maps.model for maps in several)), LARGE)
    return figure


def lines(axes: Axes, one: LayerMap, heads: Sequence[int], *, spread: bool | None) -> None:
    """The mean of each head, shaded by its spread where there is any."""
    plot(axes, one.profile.distances.numpy(), one.profile.mean, heads)
    shade = bool((one.profile.spread.nan_to_num() > 0).any()) and len(heads) <= 4 if spread is None else spread
    if not shade:
        return
    for head, colour in zip(heads, shades(one.heads)[list(heads)], strict=True):
        mean, around = one.profile.mean[head].numpy(), one.profile.spread[head].numpy()
        axes.fill_between(one.profile.distances, mean - around, mean + around, color=colour, alpha=0.15, linewidth=0)


def plot(axes: Axes, distances: np.ndarray, values: Float[Tensor, "head distance"], heads: Sequence[int]) -> None:
    """A line per head."""
    for head, colour in zip(heads, shades(len(values))[list(heads)], strict=True):
        axes.plot(distances, values[head].numpy(), color=colour, linewidth=0.9, label=f"Head {head + 1}")


def finish(axes: Axes, what: str, *, log: bool) -> None:
    """Labels, ticks and the kind of axis; logarithmic but for distances 0 and 1, so that 0 is there too."""
    if log:
        axes.set_xscale("symlog", linthresh=1, base=10)
    axes.set_xlabel("distance (query \N{MINUS SIGN} key)", size=MIDDLE)
    axes.set_ylabel(what, size=MIDDLE)
    axes.tick_params(labelsize=SMALL, length=2, width=0.5)
    axes.axhline(0, color=GREY, linewidth=0.4, zorder=0)
    for edge in axes.spines.values():
        edge.set_linewidth(0.5)
    axes.spines[["top", "right"]].set_visible(False)


def label(maps: PositionMaps) -> str:
    """What the height of a line is."""
    return {"profile": "mean score", "bias": "bias"}.get(maps.what, f"mean of {maps.what}")


def shades(heads: int) -> np.ndarray:
    """A colour per head in their order, readable without telling red from green; the palest left out."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.92, heads))
