"""`lengthwise show --out heads.html`: from names to the interactive page, with a run's snapshots where it has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lengthwise.inspect.lazy_scores import QUANTITIES, LazyScores
from lengthwise.inspect.model_maps import position_records, position_views
from lengthwise.inspect.show import parse_numbers, read
from lengthwise.inspect.subject import Subject, find_subject
from lengthwise.inspect.text import Sequences
from lengthwise.model.families import family_of
from lengthwise.runs import Run
from lengthwise.views.maps import PositionMaps, What
from lengthwise.views.page import Page, Snapshot, checked_page
from lengthwise.views.storage import load_maps

TILES = 5 * 2**19
"""How many tiles a file has of all heads of all views: some 3 bytes each, and a page of 10 MB still opens at once."""

CELLS = 2**22
"""How many single cells of named heads go into a file at most, of one view."""

TILED = 3
"""Views that have no structure: content, scores and weights."""

Heads = list[tuple[int, int]]


def show_page(
    names: Sequence[str],
    *,
    out: str,
    layer: str | None = None,
    heads: str | None = None,
    what: What | None = None,
    part: str | None = None,
    length: int | None = None,
    text: str | None = None,
    detail: str | None = None,
    seed: int = 0,
    force: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Write the page of what was named; returns what is on it and where it is."""
    if not names:
        raise ValueError("show needs something to show; nothing came. Name an encoding, a run or a checkpoint.")
    if heads is not None:
        raise ValueError(f"a page has all heads; --heads {heads} came. Leave it out; --detail gives heads every cell.")
    path = checked_page(out, force=force)
    close = [] if detail is None else parse_heads(detail)
    models, told = [], []
    for name in names:
        subject = find_subject(name, seed=seed, trust_remote_code=trust_remote_code)
        sequences = read(subject, length=length, text=text, seed=seed)
        _check_detail(close, sequences.ids.shape[1])
        views = look(subject, sequences, layer=layer or "all", what=what, part=part)
        single = _detail(subject, sequences, close, views, part)
        models.append([*snapshots_of(name), Snapshot(views, detail=single)])
        first = next(iter(views.values()))
        told.append(f"{first.title}, {sequences.ids.shape[1]} tokens of {sequences.told}: {', '.join(views)}.")
    Page(models).save(path, force=force)
    return "\n".join([*told, f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB)."])


def look(
    subject: Subject, sequences: Sequences, *, layer: str, what: What | None = None, part: str | None = None
) -> dict[What, PositionMaps]:
    """Every view of a model, or one."""
    chosen = None if layer == "all" else [-1] if layer == "last" else parse_numbers("layer", layer)
    whats: Sequence[What] | None = None if what is None else [what]
    depths = family_of(subject.model).depths
    depth = next(iter(depths.values())) if part is None else depths.get(part, 1)
    heads = subject.model.config.get_text_config().num_attention_heads * (depth if chosen is None else len(chosen))
    views = position_views(
        subject.model,
        sequences.ids,
        "all" if chosen is None else chosen,
        whats,
        part=part,
        shown="first",
        resolution=max(16, math.isqrt(TILES // (heads * (TILED if whats is None else 1)))),
        tokens=sequences.tokens,
    )
    return {name: replace(maps, model=subject.name) for name, maps in views.items()}


def snapshots_of(name: str) -> list[Snapshot]:
    """The maps that a run kept while it trained."""
    if not Path(name).is_dir() or not Run.is_run(name):
        return []
    run = Run(name)
    found = []
    for path in run.maps:
        maps = load_maps(path)
        found.append(Snapshot({maps.what: replace(maps, model=run.name)}, int(path.stem.removeprefix("step-"))))
    return found


def parse_heads(said: str) -> Heads:
    """Heads by layer and number, both counted from 1.

    >>> parse_heads("12.1,12.3")
    [(11, 0), (11, 2)]
    """
    found: Heads = []
    for one in said.split(","):
        layer, _, head = one.strip().partition(".")
        if not (layer.isdigit() and head.isdigit() and int(layer) and int(head)):
            raise ValueError(f"detail must be LAYER.HEAD from 1 on, such as '12.1,12.3'; {said!r} came. Change it.")
        found.append((int(layer) - 1, int(head) - 1))
    return found


def _detail(
    subject: Subject, sequences: Sequences, heads: Heads, views: Mapping[What, PositionMaps], part: str | None
) -> dict[What, dict[tuple[int, int], Tensor]]:
    """Every number of some heads, in every view that is not described anyway."""
    if not heads:
        return {}
    cells = LazyScores(position_records(subject.model, sequences.ids[:1], part=part))
    found: dict[What, dict[tuple[int, int], Tensor]] = {}
    for what, maps in views.items():
        if what in QUANTITIES and any(one.tiles is not None for one in maps.maps):
            for layer, head in heads:
                _, _, queries, keys = cells.record(layer, head).shape
                exact = cells.part(what, layer, head, slice(0, queries), slice(0, keys))
                found.setdefault(what, {})[layer, head] = exact
    return found


def _check_detail(heads: Heads, length: int) -> None:
    if len(heads) * length**2 > CELLS:
        raise ValueError(
            f"a page keeps {CELLS:,} single cells of named heads at most; {len(heads)} of {length:,} x {length:,} "
            "came. Name fewer, make the text shorter, or use `lengthwise serve`, which has single cells of all."
        )
