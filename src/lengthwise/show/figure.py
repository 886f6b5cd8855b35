"""`lengthwise show`: from names to a figure, and a line on what it shows."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.show.options import ShowOptions, Style, check_names, compute_views, parse_numbers
from lengthwise.views import PositionMaps
from lengthwise.views.figures import compare
from lengthwise.views.style import checked_path, save_picture


def show_figure(
    names: Sequence[str], options: ShowOptions | None = None, *, out: str | None = None, force: bool = False
) -> str:
    """Draw models, several side by side; returns what was drawn and where it is."""
    options = options or ShowOptions()
    check_names(names)
    if options.detail is not None:
        raise ValueError(f"--detail must be with --out NAME.html, since only a page has cells, got {options.detail!r}")
    path = checked_path(out or f"{'-'.join(Path(name).resolve().name for name in names)}.png", force=force)
    heads = None if options.heads is None else parse_numbers("heads", options.heads)
    shown = [model_maps(name, options) for name in names]
    save_picture(_draw([maps for maps, _ in shown], heads, options.style), path, force=force)
    return "\n".join([*(line for _, line in shown), f"Wrote {path}."])


def model_maps(name: str, options: ShowOptions) -> tuple[PositionMaps, str]:
    """The maps of a model by its name, and a line on what they are."""
    loaded = options.load(name)
    sample = options.sample(loaded)
    quantities = None if options.quantity is None else [options.quantity]
    views = compute_views(loaded, sample, options.layers("last"), quantities, part=options.part)
    maps = views[options.quantity or ("bias" if "bias" in views else "scores")]
    note = "" if options.quantity or maps.quantity == "bias" else " (it adds no bias, so the scores)"
    return maps, f"{maps.title}{note}, {sample.ids.shape[1]} tokens of {sample.description}."


def _draw(models: list[PositionMaps], heads: list[int] | None, style: Style | None) -> Figure:
    (maps, *others) = models
    single = not others and maps.quantity != "profile" and len(maps.layers) == 1
    if style == "paper" and not single:
        raise ValueError("--style paper must be of one model and one layer, and not of a profile")
    most = max(len(maps.layers) for maps in models)
    if most > 1 and (others or maps.quantity == "profile"):
        raise ValueError(f"--layer must be one layer for several models and for profiles, got {most}")
    if others:
        return compare(models, heads=heads)
    if maps.quantity == "profile":
        return maps.curves(heads=heads)
    if not single and heads is not None:
        raise ValueError("--heads must be of one layer, since several are drawn with all their heads")
    if not single:
        return maps.overview()
    return maps.paper_figure(heads=heads) if style == "paper" else maps.figure(heads=heads)
