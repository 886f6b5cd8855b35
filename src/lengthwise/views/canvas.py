"""What all pictures share: sizes in inches, letters, ticks, colours, and how a picture becomes a file.

Figures are made without pyplot, so nothing is shown, nothing stays open, and threads may draw.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure

from lengthwise.files import write_atomic

SMALL, MIDDLE, LARGE = 5.5, 7.0, 8.5
"""Letters in points: they stay readable at a paper's full width of about 6.3 inches."""

GREY = "0.35"
FORMATS = ("png", "svg", "pdf")
LETTERS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Colours:
    """A colour map and its range, both for readers who do not see red and green apart."""

    map: Colormap
    norm: Normalize
    nothing: str = "1.0"
    """The grey of where there is no number: white, unless white is a colour of the map."""

    def paint(self, values: np.ndarray) -> np.ndarray:
        """RGBA bytes."""
        painted = self.map(self.norm(np.nan_to_num(values)), bytes=True)
        painted[np.isnan(values)] = (*[round(255 * float(self.nothing))] * 3, 255)
        return painted


def colours(values: np.ndarray, *, log: bool = False) -> Colours:
    """One colour from end to end; two about 0 where at least a tenth of the range lies on either side of it.

    `log` is for numbers above 0 of every size: by their logarithm, from a 10,000th of the greatest.
    """
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if log and high > 0:
        low = min(max(low, high / 10_000), high / 10)
        return Colours(matplotlib.colormaps["viridis"], LogNorm(low, high, clip=True))
    if low < 0 < high and min(-low, high) >= (high - low) / 10:
        end = max(-low, high)
        return Colours(matplotlib.colormaps["RdBu_r"], Normalize(-end, end), "0.88")
    if low == high:
        # One colour needs a range all the same: that of 0, or of 1 where it is 0.
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    return Colours(matplotlib.colormaps["viridis"], Normalize(low, high))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), dpi=200)


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes by inches from the left and from the top."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def write(figure: Figure, left: float, top: float, text: str, size: float = MIDDLE, color: str = "black") -> None:
    """A line of text by inches from the left and from the top."""
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, size=size, color=color, va="top", parse_math=False)


def ticks(length: int, most: int = 6) -> list[int]:
    """Round numbers from 0 below a length: every 100 for 512, as in the paper.

    >>> ticks(512)
    [0, 100, 200, 300, 400, 500]
    """
    step = 10 ** max(0, math.floor(math.log10(max(1, length))) - 1)
    steps = (factor * step for factor in (1, 2, 5, 10, 20, 50, 100))
    chosen = next(one for one in steps if -(-length // one) <= most)
    return list(range(0, length, chosen))


def number(value: float) -> str:
    """A number in two digits with a real minus sign; a dash where there is none.

    >>> number(-0.0123), number(0.0), number(float("nan"))
    ('−0.012', '0', '–')
    """
    if math.isnan(value):
        return "\N{EN DASH}"
    return ("0" if value == 0 else f"{value:.2g}").replace("-", "\N{MINUS SIGN}")


def checked_path(path: str | Path, *, force: bool) -> Path:
    """Where a picture may be written, or an error."""
    path = Path(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise ValueError(
            f"a picture's name must end in {', '.join(f'.{one}' for one in FORMATS)}; {path.name!r} came. Change it."
        )
    if path.is_dir():
        raise IsADirectoryError(f"a picture must be a file; {path} is a folder. Give a name inside it.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} must not be there yet; it is. Pass --force (force=True) to overwrite it.")
    return path


def save_picture(figure: Figure, path: str | Path, *, force: bool = False) -> Path:
    """Write a picture as its name says, .png, .svg or .pdf, whole or not at all."""
    path = checked_path(path, force=force)
    return write_atomic(path, rendered(figure, path.suffix.lower().removeprefix(".")))


def png(figure: Figure) -> bytes:
    """A picture as the bytes of a PNG."""
    return rendered(figure, "png")


def in_few_colours(content: bytes) -> bytes:
    """A PNG in 256 colours, which no eye tells from the first and which has less than half its bytes."""
    from PIL import Image  # matplotlib's own

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content)) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return min(content, buffer.getvalue(), key=len)


def rendered(figure: Figure, form: str) -> bytes:
    """A picture as bytes; the same picture gives the same bytes."""
    said = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
    buffer = io.BytesIO()
    with matplotlib.rc_context(LETTERS | {"svg.hashsalt": "lengthwise"}):
        figure.savefig(buffer, format=form, dpi=figure.dpi, metadata=said)
    return buffer.getvalue()
