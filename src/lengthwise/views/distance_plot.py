"""Mean against distance, a line per head: the one figure in which encodings of every kind can be compared."""

from collections.abc import Sequence
from textwrap import fill

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lengthwise.views.grid import checked_heads, heading, panel
from lengthwise.views.maps import LayerMap, LayerMaps
from lengthwise.views.style import GREY, LARGE, MIDDLE, SMALL, axes_at, colour_scale, new_figure, write

WIDTH, HEIGHT, LEFT, TOP, BELOW, KEY = 2.9, 2.1, 0.62, 0.48, 0.42, 0.75
"""Inches: a panel, the space at its left, above and below it, and the legend beside it."""


def distance_plot(
    maps: LayerMaps,
    *,
    heads: Sequence[int] | None = None,
    log: bool = False,
    spread: bool | None = None,
) -> Figure:
    """The only layer's heads against distance; beside them the kernels of rotary heads where they are known."""
    (layer_map,) = maps.maps
    shown = checked_heads(heads, layer_map.heads)
    panels = 1 if layer_map.kernel is None else 2
    figure = new_figure(panels * (LEFT + WIDTH) + KEY, TOP + HEIGHT + BELOW)
    # About 14 letters of this size go into an inch, and there is space for two lines.
    write(figure, 0.06, 0.06, fill(heading(maps, layer_map), int(14 * figure.get_figwidth())), LARGE)
    axes = axes_at(figure, LEFT, TOP, WIDTH, HEIGHT)
    head_lines(axes, layer_map, shown, spread=spread)
    finish(axes, label(maps), log=log)
    if layer_map.kernel is not None:
        axes = axes_at(figure, 2 * LEFT + WIDTH, TOP, WIDTH, HEIGHT)
        plot(axes, np.arange(layer_map.kernel.shape[1]), layer_map.kernel, shown)
        finish(axes, "score of the mean query and key", log=log)
    axes.legend(fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, labelspacing=0.35)
    return figure


def compare(
    several: Sequence[LayerMaps], *, layer: int | None = None, heads: Sequence[int] | None = None, log: bool = False
) -> Figure:
    """Several models side by side, a column each: curves against distance on one scale, and below them a few maps.

    `layer` is the last of each if not given; `heads` are those whose maps are drawn, the first three by default.
    """
    if not several:
        raise ValueError("a comparison must have the maps of at least one model, got none")
    layer_maps = [maps.only(layer).maps[0] for maps in several]
    have_maps = all(layer_map.described is not None or layer_map.tiles is not None for layer_map in layer_maps)
    fewest = min(layer_map.heads for layer_map in layer_maps)
    shown = checked_heads(range(min(3, fewest)) if heads is None else heads, fewest)
    width, side = 2.3, 1.5
    rows = shown if have_maps else []
    figure = new_figure(len(several) * (LEFT + width), TOP + HEIGHT + BELOW + len(rows) * (side + 0.3))
    first: Axes | None = None
    for column, (maps, layer_map) in enumerate(zip(several, layer_maps, strict=True)):
        left = column * (LEFT + width) + LEFT
        axes = axes_at(figure, left, TOP, width - 0.15, HEIGHT)
        if first is not None and maps.quantity == several[0].quantity:
            axes.sharey(first)
        first = first or axes
        head_lines(axes, layer_map, checked_heads(None, layer_map.heads), spread=False)
        finish(axes, label(maps), log=log)
        axes.set_title(f"{maps.encoding}: {maps.quantity}", size=MIDDLE)
        for row, head in enumerate(rows):
            top = TOP + HEIGHT + BELOW + row * (side + 0.3) + 0.1
            image = layer_map.pooled(256).mean[head].numpy()
            bar = axes_at(figure, left + side + 0.06, top, 0.06, side)
            map_axes = axes_at(figure, left, top, side, side)
            panel(map_axes, layer_map, image, colour_scale(image, log=maps.quantity == "weights"), bar)
            map_axes.set_ylabel(f"Head {head + 1}", size=SMALL, labelpad=1)
    write(figure, 0.06, 0.06, ", ".join(dict.fromkeys(maps.model for maps in several)), LARGE)
    return figure


def head_lines(axes: Axes, layer_map: LayerMap, heads: Sequence[int], *, spread: bool | None) -> None:
    """The mean of each head, shaded by its spread where there is any."""
    profile = layer_map.profile
    plot(axes, profile.distances.numpy(), profile.mean, heads)
    shade = bool((profile.spread.nan_to_num() > 0).any()) and len(heads) <= 4 if spread is None else spread
    if not shade:
        return
    for head, colour in zip(heads, shades(layer_map.heads)[list(heads)], strict=True):
        mean, deviation = profile.mean[head].numpy(), profile.spread[head].numpy()
        axes.fill_between(profile.distances, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)


def plot(axes: Axes, distances: np.ndarray, values: Float[Tensor, "head distance"], heads: Sequence[int]) -> None:
    """A line per head."""
    for head, colour in zip(heads, shades(len(values))[list(heads)], strict=True):
        axes.plot(distances, values[head].numpy(), color=colour, linewidth=0.9, label=f"Head {head + 1}")


def finish(axes: Axes, height: str, *, log: bool) -> None:
    """Labels, ticks and the kind of axis; a logarithmic one is linear from 0 to 1, so that 0 is on it."""
    if log:
        axes.set_xscale("symlog", linthresh=1, base=10)
    axes.set_xlabel("distance (query \N{MINUS SIGN} key)", size=MIDDLE)
    axes.set_ylabel(height, size=MIDDLE)
    axes.tick_params(labelsize=SMALL, length=2, width=0.5)
    axes.axhline(0, color=GREY, linewidth=0.4, zorder=0)
    for edge in axes.spines.values():
        edge.set_linewidth(0.5)
    axes.spines[["top", "right"]].set_visible(False)


def label(maps: LayerMaps) -> str:
    """The label of the vertical axis."""
    return {"profile": "mean score", "bias": "bias"}.get(maps.quantity, f"mean of {maps.quantity}")


def shades(heads: int) -> np.ndarray:
    """A colour per head, in order, readable without telling red from green; without the palest."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.92, heads))
