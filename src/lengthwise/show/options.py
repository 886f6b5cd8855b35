"""What figure and page share: the options of `lengthwise show`, the text that a model reads, and its views."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lengthwise.inspect import position_views
from lengthwise.loading import INITIAL_LENGTH, LoadedModel, TokenSample, load_model, sample_tokens
from lengthwise.model.families import AttentionRecord, family_of
from lengthwise.views import PositionMaps, Quantity

Layers = list[int] | Literal["all"]
"""Layers counted from 0, or from -1 backwards."""

Style = Literal["paper", "annotated"]
"""How the CABLE paper prints a figure, or with two numbers in every panel."""

SEQUENCES = 3
"""The one that is drawn, and two more to measure how far it depends on its tokens."""


@dataclass(frozen=True)
class ShowOptions:
    """How to show a model; layers and heads are counted from 1, as on the command line."""

    layer: str | None = None
    """Such as 3 or 1-4; "last" or "all". A figure has the last by default, a page all."""
    heads: str | None = None
    """Such as 1-3,12. A page always has all."""
    quantity: Quantity | None = None
    """The bias if there is one, by default."""
    part: str | None = None
    """"decoder", "encoder" or "cross", where a model has several."""
    length: int | None = None
    """In tokens; 512 by default, if the model takes so many."""
    text: str | None = None
    """What the model reads; sampled from held-out text by default."""
    style: Style | None = None
    """"annotated" by default."""
    detail: str | None = None
    """Heads of which a page has every cell, as LAYER.HEAD."""
    seed: int = 0
    trust_remote_code: bool = False

    def load(self, name: str) -> LoadedModel:
        """The model of a name."""
        return load_model(name, seed=self.seed, trust_remote_code=self.trust_remote_code)

    def sample(self, loaded: LoadedModel) -> TokenSample:
        """The tokens that a model reads."""
        length = self.length
        if length is None and self.text is None:
            limit = family_of(loaded.model).max_length
            length = min(INITIAL_LENGTH, limit or INITIAL_LENGTH)
        return sample_tokens(loaded, length=length, text=self.text, seed=self.seed, count=SEQUENCES)

    def layers(self, default: str) -> Layers:
        """Layers counted from 0."""
        layer = self.layer or default
        return "all" if layer == "all" else [-1] if layer == "last" else parse_numbers("layer", layer)


def compute_views(
    loaded: LoadedModel,
    sample: TokenSample,
    layers: Layers,
    quantities: Sequence[Quantity] | None = None,
    *,
    part: str | None = None,
    tiles: int | None = None,
    on_record: Callable[[AttentionRecord], None] | None = None,
) -> dict[Quantity, PositionMaps]:
    """Views of a model, all if none are named, from one forward pass.

    tiles       how many there are of all heads of all views, if that is limited
    on_record   called with what each layer computed, in order
    """
    resolution = None
    if tiles is not None:
        heads = loaded.model.config.get_text_config().num_attention_heads * layer_count(loaded, layers, part)
        resolution = max(16, math.isqrt(tiles // (heads * (TILED if quantities is None else len(quantities)))))
    views = position_views(
        loaded.model,
        sample.ids,
        layers,
        quantities,
        part=part,
        shown="first",
        resolution=resolution,
        tokens=sample.tokens,
        on_record=on_record,
    )
    return {quantity: replace(maps, model=loaded.name) for quantity, maps in views.items()}


TILED = 3
"""How many views have no structure: content, scores and weights."""


def layer_count(loaded: LoadedModel, layers: Layers, part: str | None = None) -> int:
    """How many layers of a model are looked at."""
    depths = family_of(loaded.model).depths
    depth = next(iter(depths.values())) if part is None else depths.get(part, 1)
    return depth if layers == "all" else len(layers)


def check_names(names: Sequence[str]) -> None:
    """An error if nothing is named."""
    if not names:
        raise ValueError("expected an encoding, a run, a checkpoint folder or a name on the hub, got nothing to show")


MOST = 10_000
"""Layers or heads; a larger number is a slip."""


def parse_numbers(name: str, text: str) -> list[int]:
    """Numbers counted from 1, as people write them, to numbers counted from 0.

    >>> parse_numbers("heads", "1-3,12")
    [0, 1, 2, 11]
    """
    numbers: list[int] = []
    for span in text.split(","):
        first, _, last = span.strip().partition("-")
        counted = first.isdecimal() and (last or first).isdecimal()
        if not counted or not 1 <= int(first) <= int(last or first) <= MOST:
            raise ValueError(f"{name} must be numbers from 1 on, such as '1-3,12', got {text!r}")
        numbers += range(int(first) - 1, int(last or first))
    return numbers


def parse_heads(text: str) -> list[tuple[int, int]]:
    """Heads by layer and number, both counted from 1, to pairs counted from 0.

    >>> parse_heads("12.1,12.3")
    [(11, 0), (11, 2)]
    """
    heads = []
    for pair in text.split(","):
        layer, _, head = pair.strip().partition(".")
        if not (layer.isdecimal() and head.isdecimal() and int(layer) and int(head)):
            raise ValueError(f"detail must be LAYER.HEAD from 1 on, such as '12.1,12.3', got {text!r}")
        heads.append((int(layer) - 1, int(head) - 1))
    return heads
