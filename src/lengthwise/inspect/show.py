"""`lengthwise show`: from a name to a picture, and a word on what it shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.inspect.capture import Layers
from lengthwise.inspect.model_maps import position_views
from lengthwise.inspect.subject import TRAINED_AT, Subject, find_subject
from lengthwise.inspect.text import Sequences, sample
from lengthwise.model.families import family_of
from lengthwise.views.canvas import checked_path, save_picture
from lengthwise.views.curves import compare
from lengthwise.views.maps import PositionMaps, What

SEQUENCES = 3
"""The one that is shown, and two beside it to tell how far it follows its tokens."""


def show(
    names: Sequence[str],
    *,
    out: str | None = None,
    layer: str = "last",
    heads: str | None = None,
    what: What | None = None,
    part: str | None = None,
    length: int | None = None,
    text: str | None = None,
    seed: int = 0,
    force: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Draw what was named, several side by side; returns what was drawn and where it is."""
    if not names:
        raise ValueError("show needs something to show; nothing came. Name an encoding, a run or a checkpoint.")
    path = checked_path(out or f"{'-'.join(Path(name).name for name in names)}.png", force=force)
    chosen = None if heads is None else parse_numbers("heads", heads)
    found, told = [], []
    for name in names:
        maps, said = look_at(
            name,
            layer=layer,
            what=what,
            part=part,
            length=length,
            text=text,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        found.append(maps)
        told.append(said)
    save_picture(_draw(found, chosen), path, force=force)
    return "\n".join([*told, f"Wrote {path}."])


def look_at(
    name: str,
    *,
    layer: str = "last",
    what: What | None = None,
    part: str | None = None,
    length: int | None = None,
    text: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> tuple[PositionMaps, str]:
    """The maps of what was named, and a line that says what they are of."""
    subject = find_subject(name, seed=seed, trust_remote_code=trust_remote_code)
    sequences = read(subject, length=length, text=text, seed=seed)
    layers: Layers = "all" if layer == "all" else [-1] if layer == "last" else parse_numbers("layer", layer)
    views = position_views(
        subject.model,
        sequences.ids,
        layers,
        None if what is None else [what],
        part=part,
        shown="first",
        tokens=sequences.tokens,
    )
    maps = views[what or ("bias" if "bias" in views else "scores")]
    note = "" if what or maps.what == "bias" else " (it adds no bias, so the scores)"
    maps = replace(maps, model=subject.name)
    return maps, f"{maps.title}{note}, {sequences.ids.shape[1]} tokens of {sequences.told}."


def read(subject: Subject, *, length: int | None, text: str | None, seed: int) -> Sequences:
    """What a model reads: so many tokens, 512 if it takes them, or the text."""
    limit = family_of(subject.model).max_length
    usual = min(TRAINED_AT, limit or TRAINED_AT) if text is None else None
    return sample(subject, length=usual if length is None else length, text=text, seed=seed, count=SEQUENCES)


def parse_numbers(name: str, said: str) -> list[int]:
    """Numbers counted from 1, as people say them and pictures show them, to numbers counted from 0.

    >>> parse_numbers("heads", "1-3,12")
    [0, 1, 2, 11]
    """
    found: list[int] = []
    for part in said.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(first) < 1 or int(last or first) < int(first):
            raise ValueError(f"{name} must be numbers from 1 on, such as '1-3,12'; {said!r} came. Change it.")
        found += range(int(first) - 1, int(last or first))
    return found


def _draw(found: list[PositionMaps], heads: list[int] | None) -> Figure:
    if len(found) > 1:
        return compare(found, heads=heads)
    (maps,) = found
    if maps.what == "profile":
        return maps.curves(heads=heads)
    return maps.figure(heads=heads) if len(maps.layers) == 1 else maps.overview()
