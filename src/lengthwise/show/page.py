"""`lengthwise show --out heads.html`: from names to the interactive page, with a run's snapshots where it has them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lengthwise.inspect.scores import PER_PAIR, LazyScores
from lengthwise.loading import LoadedModel
from lengthwise.runs import Run
from lengthwise.show.options import Layers, ShowOptions, check_names, compute_views, layer_count, parse_heads
from lengthwise.show.steps import run_snapshots
from lengthwise.views import PositionMaps, Quantity
from lengthwise.views.page import Page, Snapshot, checked_page

TILES = 5 * 2**19
"""How many tiles a file has of all heads of all views: about 3 bytes each, and a page of 10 MB still opens at once."""

CELLS = 2**22
"""How many single cells of named heads go into a file at most, of one view."""


def show_page(names: Sequence[str], options: ShowOptions | None = None, *, out: str, force: bool = False) -> str:
    """Write the page of some models; returns what is on it and where it is."""
    options = options or ShowOptions()
    check_names(names)
    if options.heads is not None:
        raise ValueError(f"--heads must be left out for a page, which has all heads, got {options.heads!r}")
    if options.style is not None:
        raise ValueError(f"--style must be left out for a page, which has one of its own, got {options.style!r}")
    path = checked_page(out, force=force)
    models, lines = [], []
    for name in names:
        snapshots, line = model_snapshots(name, options)
        models.append(snapshots)
        lines.append(line)
    Page(models).save(path, force=force)
    return "\n".join([*lines, f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB)."])


def model_snapshots(name: str, options: ShowOptions) -> tuple[list[Snapshot], str]:
    """A model's snapshots for the page, and a line on what they are."""
    detail = [] if options.detail is None else parse_heads(options.detail)
    loaded = options.load(name)
    sample = options.sample(loaded)
    length = sample.ids.shape[1]
    if len(detail) * length**2 > CELLS:
        raise ValueError(
            f"--detail must be at most {CELLS:,} single cells, got {len(detail)} x {length:,} x {length:,}; name fewer "
            f"heads, give --length {math.isqrt(CELLS // len(detail))} or less, or use `lengthwise serve`"
        )
    layers = options.layers("all")
    _check_detail(detail, loaded, layers, options.part)
    cells = LazyScores()
    views = compute_views(
        loaded,
        sample,
        layers,
        None if options.quantity is None else [options.quantity],
        part=options.part,
        tiles=TILES,
        on_record=cells.add if detail else None,
    )
    first = next(iter(views.values()))
    line = f"{first.title}, {length} tokens of {sample.description}: {', '.join(views)}."
    snapshots = training_snapshots(name, first.layers, options.quantity, options.part)
    if left_out := len(training_snapshots(name)) - len(snapshots):
        line += f" {left_out} of the run's snapshots are not on the page: they have nothing of what was asked for."
    return [*snapshots, Snapshot(views, detail=_every_cell(cells, detail, views))], line


def training_snapshots(
    name: str, layers: Collection[int] | None = None, quantity: Quantity | None = None, part: str | None = None
) -> list[Snapshot]:
    """The maps that a run saved while it trained: all, or what they have of some layers, one view and one part."""
    snapshots = []
    for step, maps in (run_snapshots(Run(name)) if Run.is_run(name) else {}).items():
        shown = tuple(one for one in maps.maps if layers is None or one.layer in layers)
        if shown and quantity in (None, maps.quantity) and part in (None, maps.part):
            snapshots.append(Snapshot({maps.quantity: replace(maps, maps=shown)}, step))
    return snapshots


def _check_detail(heads: list[tuple[int, int]], loaded: LoadedModel, layers: Layers, part: str | None) -> None:
    """An error for heads that are not on the page, before anything is computed."""
    depth = layer_count(loaded, "all", part)
    numbers = range(depth) if isinstance(layers, str) else [layer % depth for layer in layers]
    count = loaded.model.config.get_text_config().num_attention_heads
    for layer, head in heads:
        if layer not in numbers or head >= count:
            raise ValueError(f"--detail must name heads that are on the page, got Layer {layer + 1}, Head {head + 1}")


def _every_cell(
    cells: LazyScores, heads: list[tuple[int, int]], views: Mapping[Quantity, PositionMaps]
) -> dict[Quantity, dict[tuple[int, int], Tensor]]:
    """Every number of some heads, in every view that is not described anyway."""
    tiled = [
        quantity
        for quantity, maps in views.items()
        if quantity in PER_PAIR and any(m.tiles is not None for m in maps.maps)
    ]
    # A layer without a bias has none to enlarge.
    places = {quantity: [place for place in heads if place[0] in views[quantity].layers] for quantity in tiled}
    return {quantity: {place: cells.whole(quantity, *place) for place in own} for quantity, own in places.items()}
