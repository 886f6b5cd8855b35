"""The interactive page: every head of one model or two, in one HTML file that needs neither a network nor a server.

The file is made from the template, the style, the scripts and the data of payload.py: nothing is fetched, nothing else
runs. Token text is hostile. It goes into a script element that is data and not code, with every `<` escaped, so that it
cannot end the element; the page puts it into the document as text only; and the policy allows only our own scripts, by
their hashes.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

from lengthwise.files import write_atomic
from lengthwise.views.maps import QUANTITIES, LayerMaps, Quantity
from lengthwise.views.page.payload import Detail, tokens_of, view_payload
from lengthwise.views.style import writable_path

HEIGHT = 980
"""Pixels that the page takes in a notebook."""
STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "numbers",
    "matrix",
    "colours",
    "state",
    "picture",
    "overview",
    "enlarged",
    "moving",
    "curves",
    "reading",
    "main",
)
"""In the order in which each needs those before it."""
LIVE = "live"
"""The script that talks to a server; only the served page has it."""
MARK = re.compile(r"\{\{(\w+)\}\}")


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


def document(payload: dict[str, Any], *, title: str, live: bool = False) -> str:
    """The page as text."""
    scripts = [asset(f"{name}.js") for name in (*SCRIPTS, *([LIVE] if live else []))]
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy(live=live)),
        "style": asset("page.css"),
        "live": asset("live.html") if live else "",
        "data": as_data({**payload, "palettes": palettes()}),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # One pass, so that marks inside the parts are left alone.
    return MARK.sub(lambda mark: parts[mark[1]], asset("page.html"))


def policy(*, live: bool) -> str:
    """What a browser is allowed: these scripts, this style, and requests to the page's own server if it has one."""
    scripts = [asset(f"{name}.js") for name in (*SCRIPTS, *([LIVE] if live else []))]
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(asset('page.css'))}",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def as_data(payload: Any) -> str:
    """JSON that cannot end the script element that holds it; NaN is refused, since JSON has none."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def iframe(page: str, height: int) -> str:
    """A page as an element of another, isolated from it: its own origin, and scripts but nothing else."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(page)}" '
        f'style="width: 100%; height: {height}px; border: 0" title="Position maps"></iframe>'
    )


@cache
def asset(name: str) -> str:
    """A file of the page."""
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def palettes() -> dict[str, str]:
    """The colours of the figures, 256 of each map, as base64 of red, green and blue."""
    names = {"one": "viridis", "two": "RdBu_r"}
    return {
        name: base64.b64encode(matplotlib.colormaps[colormap](range(256), bytes=True)[:, :3].tobytes()).decode()
        for name, colormap in names.items()
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
