"""Figures and pages of the positional part of attention, from arrays and biases, never from models."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.views.figures import distance_plot, grid, overview
from lengthwise.views.maps import QUANTITIES, LayerMap, LayerMaps, Profile, Quantity, read_maps, save_maps
from lengthwise.views.page import Page, Snapshot
from lengthwise.views.style import png
from lengthwise.views.tiles import Tiles

__all__ = ["QUANTITIES", "LayerMap", "PositionMaps", "Profile", "Quantity", "Tiles", "load_maps"]


class PositionMaps(LayerMaps):
    """The maps of some layers of one model. In a notebook it shows itself."""

    def figure(self, layer: int | None = None, *, heads: Sequence[int] | None = None, shared: bool = False) -> Figure:
        """A panel per head of one layer, the last if none is named; `shared` gives all one range of colours."""
        return grid(self.only(layer), heads=heads, shared=shared)

    def overview(self) -> Figure:
        """Every head of every layer in small: a row per layer, a column per head."""
        return overview(self)

    def curves(
        self,
        layer: int | None = None,
        *,
        heads: Sequence[int] | None = None,
        log: bool = False,
        spread: bool | None = None,
    ) -> Figure:
        """Mean against distance, a line per head; `spread` shades it, by default where there is any."""
        return distance_plot(self.only(layer), heads=heads, log=log, spread=spread)

    def page(self) -> Page:
        """All of it as an interactive page: `.save("heads.html")` writes one file that needs no network."""
        return Page([[Snapshot({self.quantity: self})]])

    def save(self, path: str | Path) -> Path:
        """One safetensors file, which `load_maps` reads; described forms stay described."""
        return save_maps(self, path)

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def _repr_png_(self) -> bytes:
        if self.quantity == "profile":
            return png(self.curves())
        return png(self.figure() if len(self.layers) == 1 else self.overview())


def load_maps(path: str | Path) -> PositionMaps:
    """Read what `PositionMaps.save` wrote."""
    return PositionMaps(**read_maps(path))
