"""docs/gallery.md: the trained maps of the package as pictures with their numbers, and as one offline page.

Every number of the text is computed from the maps; what there are no maps of is named, and not drawn.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.files import write_atomic
from lengthwise.runs import Run
from lengthwise.show.paper import draw
from lengthwise.show.paper_figures import FIGURES, PaperFigure
from lengthwise.show.steps import layer_snapshots
from lengthwise.show.structure import Structure
from lengthwise.show.trained_maps import load_trained, origin_line
from lengthwise.views import PositionMaps
from lengthwise.views.described_scores import ContentScores, NetworkBias
from lengthwise.views.page import Page, Snapshot, document
from lengthwise.views.step_plot import step_plot
from lengthwise.views.style import format_number, in_few_colours, png

DPI = 110
"""Pixels an inch of the gallery's pictures: small files, and every tick can still be read."""

TILES = 128
"""Tiles along a side of what the page cannot fill in by itself."""

INTRODUCTION = """\
# Gallery: the heads of trained models

The figures of the CABLE paper (Veisi et al. 2025, Figures 8 to 15), drawn from trained maps that are part of the
package: `lengthwise show --paper` draws the same. Each is the final layer of a small GPT-2 on one sequence of held-out
text. *Context* is short for context dependence: the spread over sequences at the same query and key, root mean square,
0 where the tokens do not matter. The ranges of the paper's own figures, of a larger model and more text, are given
beside ours and were not tuned for.

This page is written by `python docs/gallery.py`, with every number computed from the maps. The same heads
interactively: [gallery/page.html](gallery/page.html), one file that needs no network.
"""


def write_gallery(docs: Path, runs: Sequence[str] = ()) -> str:
    """Write gallery.md and its pictures; with runs also how their heads moved in training."""
    trained = {figure: maps for figure in FIGURES if (maps := load_trained(figure)) is not None}
    if not trained:
        raise FileNotFoundError("a gallery must have trained maps, got none; write them with docs/trained_maps.py")
    folder = docs / "gallery"
    structures = {figure: Structure.of(maps.maps[0]) for figure, maps in trained.items()}
    sections = [INTRODUCTION]
    for figure, maps in trained.items():
        _write_picture(draw(figure, maps), folder / f"{figure.name}.png")
        sections.append(section(figure, maps, structures[figure]))
    sections.append(head_table(structures))
    missing = [figure.encoding for figure in FIGURES if figure not in trained]
    if missing:
        sections.append(f"There are no trained maps yet of {', '.join(missing)}.\n")
    for name in runs:
        run = Run(name)
        _write_picture(step_plot(layer_snapshots(run)), folder / f"moved-{run.name}.png")
    moved = sorted(folder.glob("moved-*.png"))
    if moved:
        sections.append("## How heads moved in training\n")
        sections += [f"![The heads of {_run_name(path)} by step](gallery/{path.name})\n" for path in moved]
    page = write_page(list(trained.values()), folder / "page.html")
    text = write_atomic(docs / "gallery.md", "\n".join(sections))
    sizes = sum(path.stat().st_size for path in folder.iterdir())
    return f"Wrote {text.name}, {len(trained) + len(moved)} pictures and {page.name}: {sizes:,} bytes."


def section(figure: PaperFigure, maps: PositionMaps, structure: Structure) -> str:
    """One figure: its picture, and its numbers in a sentence."""
    constant = "" if figure.constant_from is None else f"; constant from distance {structure.constant_from} on"
    printed = f" In the paper: {figure.printed}." if figure.printed else ""
    faults = "".join(f" Not as in the paper: {fault}." for fault in structure.deviations(figure))
    text = (
        f"{figure.caption}{stretched_rows(figure, maps, structure)} {structure.sentence()}{constant}.{printed}{faults} "
        f"{origin_line(maps.origin)} Licence of the text: {maps.origin['licence']}."
    )
    picture = f"![The {maps.quantity} of {figure.encoding}](gallery/{figure.name}.png)"
    return f"## Figure {figure.number}: {figure.encoding}\n\n{picture}\n\n{textwrap.fill(text, 120)}\n"


def stretched_rows(figure: PaperFigure, maps: PositionMaps, structure: Structure) -> str:
    """Which rows are beyond FIRE's L, as a further sentence; none where all are within it."""
    limit, last = structure.uniform_to, maps.maps[0].queries - 1
    if figure.follows != "positions" or limit == last:
        return ""
    stretched = f"rows {limit + 1} to {last} are stretched, and there diagonals are not uniform"
    return f" L is learned, and here it is {limit} (rounded down): {stretched}."


def head_table(structures: Mapping[PaperFigure, Structure]) -> str:
    """The range of every head, and how far it follows the tokens."""
    heads = max(len(structure.least) for structure in structures.values())
    lines = [
        "## Every head\n",
        "Least and greatest value of each head; below them its context, where the tokens matter.\n",
        f"| | {' | '.join(f'Head {head + 1}' for head in range(heads))} |",
        "|---" * (heads + 1) + "|",
    ]
    for figure, structure in structures.items():
        cells = []
        for low, high, context in zip(structure.least, structure.greatest, structure.context, strict=True):
            follows = f"<br>{format_number(context)}" if figure.follows == "tokens" else ""
            cells.append(f"{format_number(low)} to {format_number(high)}{follows}")
        lines.append(f"| {figure.encoding} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(models: Sequence[PositionMaps], path: Path) -> Path:
    """All of them on one interactive page, with as few tiles as a small file has room for."""
    named = [replace(_tiled(maps), model=f"trained on {maps.origin['tokens']:,} tokens") for maps in models]
    page = Page([[Snapshot({maps.quantity: maps})] for maps in named])
    title = f"Trained heads of {len(models)} encodings"
    return write_atomic(path, document({**page.payload(), "title": title}, title=title))


def _tiled(maps: PositionMaps) -> PositionMaps:
    """The same with tiles where values have no structure that the page knows."""
    (layer_map,) = maps.maps
    if not isinstance(layer_map.described, ContentScores | NetworkBias):
        return maps
    return replace(maps, maps=(replace(layer_map, described=None, tiles=layer_map.pooled(TILES)),))


def _write_picture(figure: Figure, path: Path) -> None:
    figure.set_dpi(DPI)
    write_atomic(path, in_few_colours(png(figure)))


def _run_name(path: Path) -> str:
    return path.stem.removeprefix("moved-")
