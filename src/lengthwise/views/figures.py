"""Figures of position maps.

- The paper's: a heat map per head, query down, key across; and all layers by all heads in small.
- Mean against distance, a line per head: the one figure in which encodings of every kind can be compared.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, MaxNLocator, ScalarFormatter
from torch import Tensor

from lengthwise.views.maps import LayerMap, LayerMaps
from lengthwise.views.style import (
    GREY,
    LARGE,
    MIDDLE,
    SMALL,
    ColourScale,
    axes_at,
    colour_scale,
    format_number,
    new_figure,
    ticks,
    wrapped,
    write,
)
from lengthwise.views.tiles import Tiles

SIDE, LEFT, RIGHT, ABOVE, BELOW = 1.16, 0.34, 0.45, 0.24, 0.22
"""A panel in inches: its side, and the room around it for ticks, colour bar and title."""

RESOLUTION, SMALL_RESOLUTION = 512, 128
"""How many pixels along a side a panel has at most: as many as a printed page shows."""

GAP = 6
"""White pixels between the small panels."""

PLOT_WIDTH, PLOT_HEIGHT, PLOT_LEFT, PLOT_TOP, PLOT_BELOW, PLOT_KEY = 2.9, 2.1, 0.62, 0.48, 0.42, 0.75
"""Inches: a panel, the space at its left, above and below it, and a column of the legend beside it."""

KEY_LINES = 24
"""How many heads a column of the legend has: as many as stand beside a panel."""

NOTE = 0.2
"""Inches below the last panel for a note of one line."""


def grid(maps: LayerMaps, *, heads: Sequence[int] | None = None, shared: bool = False) -> Figure:
    """A panel per head of the only layer, each with a colour bar of its own range, or all with one that they share."""
    (layer_map,) = maps.maps
    shown = checked_heads(heads, layer_map.heads)
    tiles = layer_map.pooled(RESOLUTION)
    images, log = tiles.mean.numpy(), maps.quantity == "weights"
    scale = colour_scale(images[shown], log=log) if shared else None
    across = min(len(shown), max(4, math.ceil(math.sqrt(len(shown)))))
    down = -(-len(shown) // across)
    width, height = LEFT + SIDE + RIGHT, ABOVE + SIDE + BELOW
    title, above = wrapped(heading(maps, layer_map), across * width - 0.12, LARGE)
    scales = [scale] if scale else [colour_scale(images[head], log=log) for head in shown]
    notes = [*zero_heads(scales), legend(maps), *pooling([tiles.pool])]
    note, below = wrapped("; ".join(notes), across * width - 0.12, SMALL)
    top = 0.26 + above
    figure = new_figure(across * width, top + down * height + NOTE + below)
    write(figure, 0.06, 0.06, title, LARGE)
    for place, head in enumerate(shown):
        row, column = divmod(place, across)
        axes = axes_at(figure, column * width + LEFT, top + row * height + ABOVE, SIDE, SIDE)
        bar = axes_at(figure, column * width + LEFT + SIDE + 0.05, top + row * height + ABOVE, 0.06, SIDE)
        panel(axes, layer_map, images[head], scales[place % len(scales)], bar)
        # The notes of a head with two sides stand at the right of its title.
        title_at, aligned = (0.5, "center") if layer_map.causal else (0.0, "left")
        axes.set_title(f"Head {head + 1}", size=MIDDLE, pad=3, x=title_at, ha=aligned)
        annotate(axes, layer_map, head)
        if column == 0:
            axes.set_ylabel("query", size=SMALL, labelpad=1)
        if place + across >= len(shown):
            axes.set_xlabel("key", size=SMALL, labelpad=1)
    write(figure, 0.06, top + down * height + 0.06, note, SMALL, GREY)
    return figure


def overview(maps: LayerMaps) -> Figure:
    """A row per layer, a column per head, every head in its own range, which stands in its corner."""
    rows = [layer_map.pooled(SMALL_RESOLUTION) for layer_map in maps.maps]
    finest = min(tiles.pool for tiles in rows)
    down, across = next(tiles.mean.shape[1:] for tiles in rows if tiles.pool == finest)
    step = (down + GAP, across + GAP)
    sheet = np.full((len(rows) * step[0], maps.heads * step[1], 4), 255, dtype=np.uint8)
    side = 0.56
    labels = [maps.layer_label(layer) for layer in maps.layers]
    causal, log = maps.maps[0].causal, maps.quantity == "weights"
    notes = ["query down, key across"]
    notes += ["in the corner the greatest and the least of each head"] * causal
    scales = [[colour_scale(image, log=log) for image in tiles.mean.numpy()] for tiles in rows]
    notes += ["colours follow the logarithm"] * log + zero_heads(chain(*scales)) + pooling(tiles.pool for tiles in rows)
    left = 0.5 + 0.055 * max(map(len, labels))
    width = left + maps.heads * side + 0.1
    title, above = wrapped(heading(maps, maps.maps[0]), width - 0.12, LARGE)
    note, below = wrapped("; ".join(notes), width - 0.12, SMALL)
    top = 0.5 + above
    figure = new_figure(width, top + len(rows) * side + 0.24 + below)
    axes = axes_at(figure, left, top, maps.heads * side, len(rows) * side)
    for row, tiles in enumerate(rows):
        # Of tiles of several sizes each has as many pixels as it has of the smallest.
        places = [torch.arange(size) * finest // tiles.pool for size in (down, across)]
        for head, image in enumerate(tiles.mean[:, places[0][:, None], places[1]].numpy()):
            scale = scales[row][head]
            y, x = row * step[0], head * step[1]
            sheet[y : y + down, x : x + across] = scale.paint(image)
            if causal:
                ends = "\n".join(map(format_number, _ends(tiles, head)))
                axes.text(
                    x + across, y, ends, size=4, color=GREY, ha="right", va="top", linespacing=1.0, parse_math=False
                )
    axes.imshow(sheet, interpolation="nearest", aspect="auto")
    axes.set_xticks([head * step[1] + across / 2 for head in range(maps.heads)])
    axes.set_xticklabels([f"Head {head + 1}" for head in range(maps.heads)], size=SMALL)
    axes.set_yticks([row * step[0] + down / 2 for row in range(len(rows))])
    named = zip(maps.layers, labels, strict=True)
    axes.set_yticklabels([f"Layer {layer + 1}\n{label}".rstrip() for layer, label in named], size=SMALL)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, pad=2)
    axes.set_frame_on(False)
    write(figure, 0.06, 0.06, title, LARGE)
    write(figure, 0.06, top + len(rows) * side + 0.08, note, SMALL, GREY)
    return figure


def _ends(tiles: Tiles, head: int) -> tuple[float, float]:
    """The greatest and the least of a head; 0 where nothing is visible."""
    visible = ~tiles.mean[head].isnan()
    if not visible.any():
        return 0.0, 0.0
    return float(tiles.greatest[head][visible].max()), float(tiles.least[head][visible].min())


def panel(
    axes: Axes,
    layer_map: LayerMap,
    image: np.ndarray,
    scale: ColourScale,
    bar: Axes | None,
    bar_ticks: Locator | None = None,
) -> None:
    """One head: pixels, ticks and colour bar."""
    queries, keys = layer_map.queries, layer_map.keys
    pool = max(1, -(-max(queries, keys) // max(image.shape)))
    down, across = image.shape[0] * pool, image.shape[1] * pool
    pixels = axes.imshow(
        np.ma.masked_invalid(image),
        cmap=scale.map,
        norm=scale.norm,
        # Pixels as they are where there is room, and where not the mean of their numbers: no false stripes.
        interpolation="auto",
        interpolation_stage="data",
        extent=(-0.5, across - 0.5, down - 0.5, -0.5),
        aspect="auto",
        rasterized=True,
    )
    axes.set_facecolor(scale.masked)
    axes.set_xlim(-0.5, keys - 0.5)
    axes.set_ylim(queries - 0.5, -0.5)
    axes.set_xticks(ticks(keys))
    axes.set_yticks(ticks(queries))
    axes.tick_params(labelsize=SMALL, length=2, width=0.5, pad=1.5)
    for edge in axes.spines.values():
        edge.set_linewidth(0.5)
    if bar is not None:
        colorbar = axes.figure.colorbar(pixels, cax=bar)
        colorbar.outline.set_linewidth(0.4)
        if not isinstance(scale.norm, LogNorm):
            colorbar.locator, colorbar.formatter = bar_ticks or MaxNLocator(6), ScalarFormatter()
            colorbar.formatter.set_powerlimits((-2, 4))
            colorbar.update_ticks()
        colorbar.ax.tick_params(labelsize=SMALL, length=1.5, width=0.4, pad=1)
        colorbar.ax.yaxis.get_offset_text().set(size=SMALL, position=(0, 1))


def annotate(axes: Axes, layer_map: LayerMap, head: int) -> None:
    """A head's numbers, in the empty half under causality, else above the panel's right corner."""
    note = corner_note(layer_map, head)
    if layer_map.causal:
        axes.text(0.97, 0.97, note, transform=axes.transAxes, size=4.8, color=GREY, ha="right", va="top")
    else:
        axes.text(1.0, 1.01, note, transform=axes.transAxes, size=3.6, color=GREY, ha="right", va="bottom")


def corner_note(layer_map: LayerMap, head: int) -> str:
    """The two spreads of a head, and its asymmetry where it has two sides."""
    numbers = {"context": layer_map.context_dependence, "diagonals": layer_map.diagonal_spread}
    if not layer_map.causal:
        numbers["sides"] = layer_map.asymmetry
    return "\n".join(f"{name} {format_number(float(x[head]))}" for name, x in numbers.items())


def heading(maps: LayerMaps, layer_map: LayerMap) -> str:
    """The title with the number of tokens."""
    queries, keys = layer_map.queries, layer_map.keys
    size = f"{queries} tokens" if queries == keys else f"{queries} x {keys} tokens"
    mean = f", mean of {maps.sequences} sequences" if maps.shown == "mean" else ""
    return f"{maps.title}, {size}{mean}"


def legend(maps: LayerMaps) -> str:
    """What the numbers in the corners mean."""
    over = f"over {maps.sequences} sequences" if maps.sequences > 1 else "over sequences (there was only one)"
    sides = "" if maps.maps[0].causal else "; sides: how far left and right differ, from 0 to 1"
    return (
        f"context: spread {over} at the same query and key, 0 where the tokens do not matter; "
        f"diagonals: spread along them, 0 where only distance matters{sides}"
    )


def pooling(pools: Iterable[int]) -> list[str]:
    """A note on how many pairs a pixel is the mean of, if more than one."""
    sizes = set(pools)
    up_to = "up to " if len(sizes) > 1 else ""
    return [f"each pixel: the mean of {up_to}{max(sizes)} x {max(sizes)} pairs"] if max(sizes) > 1 else []


def zero_heads(scales: Iterable[ColourScale]) -> list[str]:
    """A note on heads that are 0 everywhere, if there are any."""
    return ["a head in white is 0 everywhere"] if any(scale.all_zero for scale in scales) else []


def checked_heads(heads: Sequence[int] | None, count: int) -> list[int]:
    """The heads to draw, counted from 0, or an error."""
    shown = list(range(count)) if heads is None else list(heads)
    for head in shown:
        if not 0 <= head < count:
            raise ValueError(
                f"heads must be from Head 1 to Head {count} (0 to {count - 1} as indices), got Head {head + 1} "
                f"(index {head})"
            )
    if not shown:
        raise ValueError("heads must name at least one head, got none; leave it out for all")
    return shown


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
    width = panels * (PLOT_LEFT + PLOT_WIDTH) + PLOT_KEY * key_columns(len(shown))
    title, above = wrapped(heading(maps, layer_map), width - 0.12, LARGE)
    top = PLOT_TOP + above
    figure = new_figure(width, top + PLOT_HEIGHT + PLOT_BELOW)
    write(figure, 0.06, 0.06, title, LARGE)
    axes = axes_at(figure, PLOT_LEFT, top, PLOT_WIDTH, PLOT_HEIGHT)
    head_lines(axes, layer_map, shown, spread=spread)
    finish(axes, label(maps), log=log)
    if layer_map.kernel is not None:
        axes = axes_at(figure, 2 * PLOT_LEFT + PLOT_WIDTH, top, PLOT_WIDTH, PLOT_HEIGHT)
        plot(axes, np.arange(layer_map.kernel.shape[1]), layer_map.kernel, shown)
        finish(axes, "score of the mean query and key", log=log)
    draw_key(axes, len(shown))
    return figure


def key_columns(count: int) -> int:
    """How many columns a legend of so many heads has."""
    return -(-count // KEY_LINES)


def draw_key(axes: Axes, count: int) -> None:
    """A legend of the heads beside a panel."""
    axes.legend(
        fontsize=SMALL,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        frameon=False,
        labelspacing=0.35,
        ncols=key_columns(count),
    )


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
    tiles = [layer_map.pooled(RESOLUTION) for layer_map in layer_maps] if rows else []
    titles = [
        wrapped(
            f"{maps.layer_label(one.layer) or maps.encoding}: {maps.quantity}, layer {one.layer + 1}", width, MIDDLE
        )
        for maps, one in zip(several, layer_maps, strict=True)
    ]
    # Heads have the same colours in models that have as many; one legend is for all of these.
    counts = [layer_map.heads for layer_map in layer_maps]
    keys = [
        0 if count == following else key_columns(count)
        for count, following in zip(counts, [*counts[1:], 0], strict=True)
    ]
    whole = len(several) * (PLOT_LEFT + width) + sum(keys) * PLOT_KEY
    models, above = wrapped(", ".join(dict.fromkeys(maps.model for maps in several)), whole - 0.12, LARGE)
    scales = [
        [colour_scale(one.mean[head].numpy(), log=maps.quantity == "weights") for head in rows]
        for maps, one in zip(several, tiles, strict=bool(rows))
    ]
    notes = [*zero_heads(chain(*scales)), *pooling(one.pool for one in tiles)] if rows else []
    note, note_below = wrapped("; ".join(notes), whole - 0.12, SMALL)
    top = PLOT_TOP + above + max(further for _, further in titles)
    below = top + PLOT_HEIGHT + PLOT_BELOW
    end = below + len(rows) * (side + 0.3)
    figure = new_figure(whole, end + (NOTE + note_below if notes else 0))
    write(figure, 0.06, 0.06, models, LARGE)
    write(figure, 0.06, end + 0.06, note, SMALL, GREY)
    first: Axes | None = None
    for column, (maps, layer_map) in enumerate(zip(several, layer_maps, strict=True)):
        left = column * (PLOT_LEFT + width) + PLOT_LEFT + sum(keys[:column]) * PLOT_KEY
        axes = axes_at(figure, left, top, width - 0.15, PLOT_HEIGHT)
        if first is not None and maps.quantity == several[0].quantity:
            axes.sharey(first)
        first = first or axes
        head_lines(axes, layer_map, checked_heads(None, layer_map.heads), spread=False)
        finish(axes, label(maps), log=log)
        axes.set_title(titles[column][0], size=MIDDLE)
        if keys[column]:
            draw_key(axes, layer_map.heads)
        for row, head in enumerate(rows):
            map_top = below + row * (side + 0.3) + 0.1
            image = tiles[column].mean[head].numpy()
            bar = axes_at(figure, left + side + 0.06, map_top, 0.06, side)
            map_axes = axes_at(figure, left, map_top, side, side)
            panel(map_axes, layer_map, image, scales[column][row], bar)
            map_axes.set_ylabel(f"Head {head + 1}", size=SMALL, labelpad=1)
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
