"""The figures as the CABLE paper prints them (Veisi et al. 2025, Figures 8 to 15): panels and a caption, no notes."""

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lengthwise.views.figures import RESOLUTION, checked_heads, heading, panel, pooling, zero_heads
from lengthwise.views.maps import LayerMaps
from lengthwise.views.style import LARGE, MIDDLE, axes_at, colour_scale, new_figure, write

ACROSS = 3
SIDE, LEFT, RIGHT, ABOVE, BELOW = 1.5, 0.36, 0.54, 0.26, 0.18
"""A panel in inches: its side, and the space around it for ticks, colour bar and title."""

LETTERS, LINE = 18, 0.135
"""How many letters of the caption go into an inch, and how high a line of it is."""


def paper_grid(maps: LayerMaps, *, heads: Sequence[int] | None = None, caption: str | None = None) -> Figure:
    """Three panels a row, each in its own range; the caption says what the maps are unless another is given."""
    (layer_map,) = maps.maps
    shown = checked_heads(heads, layer_map.heads)
    tiles = layer_map.pooled(RESOLUTION)
    images = tiles.mean.numpy()
    across = min(ACROSS, len(shown))
    width, height = LEFT + SIDE + RIGHT, ABOVE + SIDE + BELOW
    panels = -(-len(shown) // across) * height
    log = maps.quantity == "weights"
    scales = [colour_scale(images[head], log=log, about_zero=False) for head in shown]
    notes = [*zero_heads(scales), *pooling([tiles.pool])]
    sentences = [caption or f"{heading(maps, layer_map)}.", *(f"{note.capitalize()}." for note in notes)]
    lines = textwrap.wrap(" ".join(sentences), int(LETTERS * (across * width - 0.2)))
    figure = new_figure(across * width, panels + 0.2 + len(lines) * LINE)
    for place, head in enumerate(shown):
        row, column = divmod(place, across)
        left, top = column * width + LEFT, row * height + ABOVE
        axes, bar = axes_at(figure, left, top, SIDE, SIDE), axes_at(figure, left + SIDE + 0.06, top, 0.07, SIDE)
        panel(axes, layer_map, images[head], scales[place], bar, bar_ticks())
        axes.set_title(f"Head {head + 1}", size=LARGE, pad=3)
    for number, line in enumerate(lines):
        write(figure, 0.1, panels + 0.1 + number * LINE, line, MIDDLE)
    return figure


def bar_ticks() -> MaxNLocator:
    """At most nine steps of 1, 2, 2.5 or 5 times a power of ten: the ranges of Figure 12 get the ticks it prints."""
    return MaxNLocator(9, steps=[1, 2, 2.5, 5, 10])
