"""The style that all figures share: sizes in inches, fonts, ticks, colours; and how a figure becomes a file.

Figures are made without pyplot: no window opens, nothing stays in memory, and several threads can draw.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from lengthwise.files import write_atomic

SMALL, MIDDLE, LARGE = 5.5, 7.0, 8.5
"""Font sizes in points: they stay readable at a paper's full width of about 6.3 inches."""

GREY = "0.35"
FORMATS = ("png", "svg", "pdf")
FONTS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class ColourScale:
    """A colour map and its range, readable without telling red from green."""

    map: Colormap
    norm: Normalize
    masked: str = "1.0"
    """The grey of pairs that are masked: white, unless white is a colour of the map."""
    all_zero: bool = False
    """Whether every value is 0: drawn in white, which no other head is."""

    def paint(self, values: np.ndarray) -> np.ndarray:
        """RGBA bytes."""
        painted = self.map(self.norm(np.nan_to_num(values)), bytes=True)
        painted[np.isnan(values)] = (*[round(255 * float(self.masked))] * 3, 255)
        return painted


def colour_scale(values: np.ndarray, *, log: bool = False, about_zero: bool = True) -> ColourScale:
    """One colour from end to end; two about 0 where at least a tenth of the range lies on either side of it.

    `about_zero` is False where the bar must end at the least and the greatest, as the paper's do. `log` is for weights,
    which are above 0 and of every size: their logarithm, from a 10,000th of the greatest. The page has the same rules
    in colours.js.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if log and high > 0:
        low = min(max(low, high / 10_000), high / 10)
        return ColourScale(matplotlib.colormaps["viridis"], LogNorm(low, high, clip=True))
    if about_zero and low < 0 < high and min(-low, high) >= (high - low) / 10:
        end = max(-low, high)
        return ColourScale(matplotlib.colormaps["RdBu_r"], Normalize(-end, end), "0.88")
    if low == high == 0:
        # Either end of one colour would look like the strongest value.
        return ColourScale(matplotlib.colormaps["RdBu_r"], Normalize(-1, 1), "0.88", all_zero=bool(finite.size))
    if low == high:
        # A constant needs a range too, from 0 or up to it.
        low, high = min(low, 0.0), max(high, 0.0)
    return ColourScale(matplotlib.colormaps["viridis"], Normalize(low, high))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches."""
    return Figure(figsize=(width, height), dpi=200)


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes by inches from the left and from the top."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def write(figure: Figure, left: float, top: float, text: str, size: float = MIDDLE, color: str = "black") -> None:
    """Text by inches from the left and from the top."""
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, size=size, color=color, va="top", parse_math=False)


def wrapped(text: str, width: float, size: float) -> tuple[str, float]:
    """A text in lines that fit into a width in inches, and how many inches those after the first take."""
    letters = max(1, len(text))
    while True:
        lines = textwrap.wrap(text, letters) or [""]
        widest = max(_inches(line, size) for line in lines)
        if widest <= width or letters == 1:
            return "\n".join(lines), (len(lines) - 1) * 1.25 * size / 72
        letters = max(1, min(letters - 1, int(letters * width / widest)))


def _inches(line: str, size: float) -> float:
    """How wide a line is, and a little more: hinted letters are wider."""
    font = FontProperties(family=FONTS["font.family"], size=size)
    points, _, _ = text_to_path.get_text_width_height_descent(line, font, ismath=False)
    return 1.02 * float(points) / 72


def ticks(length: int, most: int = 6) -> list[int]:
    """Round numbers from 0 below a length: every 100 for 512, as in the paper.

    >>> ticks(512)
    [0, 100, 200, 300, 400, 500]
    """
    step = 10 ** max(0, math.floor(math.log10(max(1, length))) - 1)
    steps = (factor * step for factor in (1, 2, 5, 10, 20, 50, 100))
    return list(range(0, length, next(step for step in steps if -(-length // step) <= most)))


def format_number(value: float) -> str:
    """A number in two digits or, up to 99,999, all before the point, with a real minus sign; a dash for none.

    >>> format_number(-0.0123), format_number(0.0), format_number(-1703.2), format_number(float("nan"))
    ('−0.012', '0', '−1,703', '–')
    >>> format_number(-321909856.0)
    '−3.2e8'
    """
    if math.isnan(value):
        return "\N{EN DASH}"
    whole = 99.5 <= abs(value) < 99_999.5
    text = "0" if value == 0 else f"{value:,.0f}" if whole else f"{value:.2g}"
    return re.sub(r"e\+0*", "e", text).replace("-", "\N{MINUS SIGN}")


def checked_path(path: str | Path, *, force: bool) -> Path:
    """A path that a figure can be written to, or an error."""
    return writable_path(path, [f".{name}" for name in FORMATS], "a figure", force=force)


def writable_path(path: str | Path, suffixes: Sequence[str], name: str, *, force: bool) -> Path:
    """A path with one of these suffixes that is no folder and, unless forced, no file yet; else an error."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"the path of {name} must end in {', '.join(suffixes)}, got {path.name!r}")
    if path.is_dir():
        raise IsADirectoryError(f"the path of {name} must be a file, got the folder {path}")
    if path.exists() and not force:
        raise FileExistsError(f"{path} already exists; pass --force (force=True) to overwrite it")
    return path


def save_picture(figure: Figure, path: str | Path, *, force: bool = False) -> Path:
    """Write a figure in the format of its suffix, .png, .svg or .pdf, whole or not at all."""
    path = checked_path(path, force=force)
    return write_atomic(path, rendered(figure, path.suffix.lower().removeprefix(".")))


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG."""
    return rendered(figure, "png")


def in_few_colours(content: bytes) -> bytes:
    """A PNG in 256 colours, each off by a few parts in 255 at most, and less than half the bytes."""
    from PIL import Image  # matplotlib needs it too

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content)) as picture:
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(buffer, "PNG", optimize=True)
    return min(content, buffer.getvalue(), key=len)


def rendered(figure: Figure, file_format: str) -> bytes:
    """A figure as bytes; the same figure gives the same bytes."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[file_format]
    buffer = io.BytesIO()
    with matplotlib.rc_context(FONTS | {"svg.hashsalt": "lengthwise"}):
        figure.savefig(buffer, format=file_format, dpi=figure.dpi, metadata=metadata)
    return buffer.getvalue()
