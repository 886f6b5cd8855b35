"""One HTML document from the template, the style, the scripts and the data: nothing is fetched, nothing else runs.

Token text is hostile. It goes into a script element that is data and not code, with every `<` escaped, so that it
cannot end the element; the page puts it into the document as text only; and the policy allows only our own scripts,
by their hashes.
"""

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

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
