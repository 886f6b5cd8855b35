"""The interactive page: every head of one model or two, in one HTML file that needs neither a network nor a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lengthwise.files import write_atomic
from lengthwise.views.maps import WHATS, PositionMaps, What
from lengthwise.views.page.document import document, iframe
from lengthwise.views.page.payload import Detail, tokens_of, view

Views = Mapping[What, PositionMaps]

HEIGHT = 980
"""Pixels that the page takes in a notebook."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Views of a model at one step of its training, or at its end; `detail` has every number of single heads."""

    views: Views
    step: int | None = None
    detail: Mapping[What, Detail] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Page:
    """Models to look at, each as its snapshots in order. In a notebook it shows itself."""

    models: Sequence[Sequence[Snapshot]]

    def __post_init__(self) -> None:
        if not self.models or not all(snapshots and all(one.views for one in snapshots) for snapshots in self.models):
            raise ValueError("a page needs one view of one model at least; none came. Give position maps.")

    @property
    def title(self) -> str:
        """What it shows, in a line."""
        first = [next(iter(snapshots[-1].views.values())) for snapshots in self.models]
        if len(self.models) == 1 and len(self.models[0][-1].views) == 1:
            return first[0].title
        return " and ".join(dict.fromkeys(f"{maps.encoding} ({maps.model})" for maps in first))

    def payload(self) -> dict[str, Any]:
        """What the page is told."""
        return {"title": self.title, "models": [model_payload(snapshots) for snapshots in self.models]}

    @property
    def html(self) -> str:
        """The file."""
        return document(self.payload(), title=self.title)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the file, whole or not at all."""
        path = checked_page(path, force=force)
        return write_atomic(path, self.html)

    def _repr_html_(self) -> str:
        return iframe(self.html, HEIGHT)


def model_payload(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """One model as the page is told of it."""
    last = next(iter(snapshots[-1].views.values()))
    return {
        "name": last.model,
        "encoding": last.encoding,
        "part": last.part,
        "sequences": last.sequences,
        "shown": last.shown,
        "snapshots": [
            {
                "step": one.step,
                "tokens": tokens_of(one.views),
                "views": {what: view(one.views[what], one.detail.get(what)) for what in WHATS if what in one.views},
            }
            for one in snapshots
        ],
    }


def checked_page(path: str | Path, *, force: bool) -> Path:
    """Where a page may be written, or an error."""
    path = Path(path)
    if path.suffix.lower() != ".html":
        raise ValueError(f"a page's name must end in .html; {path.name!r} came. Change it.")
    if path.is_dir():
        raise IsADirectoryError(f"a page must be a file; {path} is a folder. Give a name inside it.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} must not be there yet; it is. Pass --force (force=True) to overwrite it.")
    return path
