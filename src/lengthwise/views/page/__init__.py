"""The interactive page: every head of one model or two, in one HTML file that needs neither a network nor a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.files import write_atomic
from lengthwise.views.maps import QUANTITIES, LayerMaps, Quantity
from lengthwise.views.page.html import document, iframe
from lengthwise.views.page.payload import Detail, tokens_of, view_payload
from lengthwise.views.style import writable_path

HEIGHT = 980
"""Pixels that the page takes in a notebook."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Views of a model at one step of its training, or at its end; `detail` has every number of single heads."""

    views: Mapping[Quantity, LayerMaps]
    step: int | None = None
    detail: Mapping[Quantity, Detail] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Page:
    """Models, each as its snapshots in order. In a notebook it shows itself."""

    models: Sequence[Sequence[Snapshot]]

    def __post_init__(self) -> None:
        if not self.models or not all(snapshots and all(one.views for one in snapshots) for snapshots in self.models):
            raise ValueError("a page must have at least one view of one model, got none")

    @property
    def title(self) -> str:
        """What it shows, in a line."""
        first = [next(iter(snapshots[-1].views.values())) for snapshots in self.models]
        if len(self.models) == 1 and len(self.models[0][-1].views) == 1:
            return first[0].title
        return " and ".join(dict.fromkeys(f"{maps.encoding} ({maps.model})" for maps in first))

    def payload(self) -> dict[str, Any]:
        """The JSON sent to the page."""
        return {"title": self.title, "models": [model_payload(snapshots) for snapshots in self.models]}

    @property
    def html(self) -> str:
        """The file."""
        return document(self.payload(), title=self.title)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the file, whole or not at all."""
        return write_atomic(checked_page(path, force=force), self.html)

    def _repr_html_(self) -> str:
        return iframe(self.html, HEIGHT)


def model_payload(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """The JSON of one model."""
    last = next(iter(snapshots[-1].views.values()))
    return {
        "name": last.model,
        "encoding": last.encoding,
        "part": last.part,
        "sequences": last.sequences,
        "shown": last.shown,
        "snapshots": [snapshot_payload(snapshot) for snapshot in snapshots],
    }


def snapshot_payload(snapshot: Snapshot) -> dict[str, Any]:
    """The JSON of a model at one step."""
    views, detail = snapshot.views, snapshot.detail
    return {
        "step": snapshot.step,
        "tokens": tokens_of(views),
        "views": {
            quantity: view_payload(views[quantity], detail.get(quantity))
            for quantity in QUANTITIES
            if quantity in views
        },
    }


def checked_page(path: str | Path, *, force: bool) -> Path:
    """A path that a page can be written to, or an error."""
    return writable_path(path, [".html"], "a page", force=force)
