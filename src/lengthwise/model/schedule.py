"""Which layer has what: encodings and windows in a list that is repeated over the depth.

    [{"encoding": "rope", "window": 512}, {"encoding": "none"}]      every second layer sees everything
    "rope:512,none"                                                  the same in short: a name, and a window behind it
    "rope:chunk8192,none"                                            chunks, as in Llama 4
    {"encoding": "rope", "window": {"nearest": 0, "farthest": 4}}    a Band, or a list of them

Encodings that act as tokens enter act once for the model: they stand in `embed`, or in every layer.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lengthwise.encodings.registry import find
from lengthwise.errors import OptionError, check_int, describe
from lengthwise.token_layout import Band, Window

FIELDS = ("encoding", "encoding_options", "window")
SHORT_WINDOW = re.compile(r"(chunk)?(\d+)")


@dataclass(frozen=True)
class LayerSpec:
    """What one layer has."""

    encoding: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    window: Window | None = None

    @property
    def reach(self) -> int | None:
        """How many slots a cache must hold for a new token, itself included; None for all of them.

        Two at least: of a window of 1 a dynamic cache of transformers keeps all tokens.
        """
        bands = (self.window,) if isinstance(self.window, Band) else self.window
        if bands is None or (not isinstance(bands, int) and any(band.farthest is None for band in bands)):
            return None
        return max(2, *([bands] if isinstance(bands, int) else [(band.farthest or 0) * band.chunk for band in bands]))

    @property
    def label(self) -> str:
        """In short: "rope:512"."""
        return self.encoding if self.window is None else f"{self.encoding}:{_short_window(self.window)}"

    def parts(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The encodings that it is made of, each with its own options."""
        names = self.encoding.split("+")
        return (
            [(name, self.options.get(name) or {}) for name in names] if len(names) > 1 else [(names[0], self.options)]
        )

    def with_parts(self, parts: Sequence[tuple[str, Mapping[str, Any]]]) -> "LayerSpec":
        """The same window with other encodings; "none" where there are none."""
        if len(parts) < 2:
            name, own = parts[0] if parts else ("none", {})
            return LayerSpec(name, own, self.window)
        options = {name: own for name, own in parts if own}
        return LayerSpec("+".join(name for name, _ in parts), options, self.window)

    def stored(self) -> dict[str, Any]:
        """As it stands in a config file."""
        stored: dict[str, Any] = {"encoding": self.encoding}
        if self.options:
            stored["encoding_options"] = dict(self.options)
        if self.window is not None:
            stored["window"] = _stored_window(self.window)
        return stored


def parse_layers(layers: object) -> list[LayerSpec]:
    """A schedule from its short form, or from a list of layers, each a dictionary or in the short form."""
    if isinstance(layers, str):
        short, layers = layers, [layer.strip() for layer in layers.split(",")]
        if not all(layers):
            raise OptionError(f"layers must be encodings between commas, as in 'rope:512,none', got {short!r}")
    if not isinstance(layers, list | tuple) or not layers:
        raise OptionError(f"layers must be a list of layers, or in short 'rope:512,none', got {describe(layers)}")
    return [parse_layer(layer) for layer in layers]


def parse_layer(layer: object) -> LayerSpec:
    """One layer from a dictionary or its short form.

    >>> parse_layer("rope:chunk16").window
    Band(nearest=0, farthest=1, first=None, chunk=16)
    """
    if isinstance(layer, str):
        name, colon, window = layer.partition(":")
        return LayerSpec(name, window=_parse_window(window) if colon else None)
    if not isinstance(layer, Mapping):
        raise OptionError(f"a layer must be a dictionary or, in short, 'rope:512', got {describe(layer)}")
    for name in layer:
        if name == "causal":
            raise OptionError(
                "all layers of a model must be causal, or none of them, got a layer with its own `causal`"
            )
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"a layer has {', '.join(map(repr, FIELDS))}, got {name!r}{hint}")
    if "encoding" not in layer:
        raise OptionError("a layer must have an `encoding`, got one without; 'none' is one")
    if not isinstance(layer["encoding"], str):
        raise OptionError(f"a layer's encoding must be a name, got {describe(layer['encoding'])}")
    options = layer.get("encoding_options") or {}
    if not isinstance(options, Mapping):
        raise OptionError(f"a layer's encoding_options must be a dictionary, got {describe(options)}")
    return LayerSpec(layer["encoding"], dict(options), _parse_window(layer.get("window")))


def split_embedding(specs: Sequence[LayerSpec], embed: LayerSpec | None) -> tuple[LayerSpec | None, list[LayerSpec]]:
    """What acts as tokens enter, if anything does, and the layers without it."""
    if embed is not None and not all(find(name).overrides("embed") for name, _ in embed.parts()):
        raise OptionError(
            f"embed must be an encoding that acts as tokens enter, such as 'learned', got {embed.encoding!r}; others "
            "stand in the layers"
        )
    if embed is not None and embed.window is not None:
        raise OptionError(f"embed acts before any attention and must have no window, got {embed.label!r}")
    rest, embeddings = [], []
    for spec in specs:
        find(spec.encoding)
        acts_once = [(name, own) for name, own in spec.parts() if find(name).overrides("embed")]
        embeddings.append(acts_once)
        rest.append(
            spec if not acts_once else spec.with_parts([part for part in spec.parts() if part not in acts_once])
        )
    if any(own != embeddings[0] for own in embeddings) or (embed is not None and embeddings[0]):
        name = next(own[0][0] for own in embeddings if own)
        raise OptionError(
            f"an encoding that acts as tokens enter must stand in `embed` or alike in every layer, got {name!r} in some"
        )
    if embed is None and embeddings[0]:
        embed = LayerSpec().with_parts(embeddings[0])
    return embed, rest


def _parse_window(window: object) -> Window | None:
    if isinstance(window, str):
        match = SHORT_WINDOW.fullmatch(window)
        if match is None:
            raise OptionError(f"a window in short must be '512' or 'chunk512', got {window!r}")
        return _band({"farthest": 1, "chunk": int(match[2])}) if match[1] else _parse_window(int(match[2]))
    if window is None or isinstance(window, Band):
        return window
    if isinstance(window, list | tuple):
        if not window:
            raise OptionError("a window of bands must have at least one, got none")
        return tuple(_band(band) for band in window)
    if isinstance(window, Mapping):
        return _band(window)
    try:
        check_int("a layer's window", window)
    except ValueError as error:
        raise OptionError(str(error)) from error
    assert isinstance(window, int)
    return window


def _band(band: object) -> Band:
    if isinstance(band, Band):
        return band
    known = [entry.name for entry in fields(Band)]
    if not isinstance(band, Mapping) or any(name not in known for name in band):
        raise OptionError(f"a band must be a dictionary of {', '.join(map(repr, known))}, got {band!r}")
    try:
        return Band(**band)
    except (TypeError, ValueError) as error:
        raise OptionError(str(error)) from error


def _stored_window(window: Window) -> Any:
    if isinstance(window, int):
        return window
    if isinstance(window, tuple):
        return [_stored_window(band) for band in window]
    usual = asdict(Band())
    return {name: value for name, value in asdict(window).items() if name == "nearest" or value != usual[name]}


def _short_window(window: Window) -> str:
    if isinstance(window, int):
        return str(window)
    bands = (window,) if isinstance(window, Band) else window
    if bands == (Band(0, 1, chunk=bands[0].chunk),):
        return f"chunk{bands[0].chunk}"
    return "+".join(f"{_band_ends(band)}" for band in bands)


def _band_ends(band: Band) -> str:
    ends = f"{band.nearest}..{'' if band.farthest is None else band.farthest}"
    chunk = f"chunk{band.chunk} " if band.chunk > 1 else ""
    return f"{chunk}{ends}" + (f" of the first {band.first}" if band.first is not None else "")
