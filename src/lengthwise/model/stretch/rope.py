"""A RoPE that is stretched: with other frequencies, or turning differently in every band."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lengthwise.encodings._rope_scaling import SCALINGS, make_scaling
from lengthwise.encodings._rotary import Waves, turn
from lengthwise.encodings.base import Encoding, Keys, Queries, State, Tokens, Zone
from lengthwise.encodings.length_scales import LogN
from lengthwise.encodings.rope import Rope
from lengthwise.model.stretch.bands import Index, Turning, constant
from lengthwise.model.stretch.spec import StretchSpec
from lengthwise.token_layout import TokenLayout, Window


class StretchedRope(Encoding):
    """A layer's own RoPE where keys beyond the trained length meet queries in another way."""

    paper = "see lengthwise.model.stretch"

    def __init__(self, rope: Rope, spec: StretchSpec, train_length: int) -> None:
        super().__init__(replace(rope.shape, train_length=train_length))
        self.rope, self.method = _with_scaling(rope, spec.scaling, train_length), spec.bands(train_length)
        self.logn = LogN(self.shape) if spec.logn else None
        self.length_dependent = self.rope.length_dependent
        if self.method is not None and self.length_dependent:
            raise NotImplementedError(
                f"bands need angles that do not depend on the length, got a RoPE with the scaling "
                f"{type(self.rope.scaling).__name__}; a scaling such as 'yarn:8' can take its place"
            )

    @property
    def rotates_late(self) -> bool:
        """A key turns in every band anew."""
        return self.method is not None or self.rope.rotates_late

    def zones(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> list[Zone]:
        """Queries and keys as they meet in each band; by number in the document, whatever the positions are."""
        if self.method is None:
            return self.rope.zones(q, k, layout, state)
        query, key = layout.indices()
        return [
            Zone(
                turn(q, self._waves(turning.query, turning.divisor), self.rope.layout),
                self._turned_keys(k, turning),
                turning.band,
            )
            for turning in self.method.turnings(query, key)
        ]

    def _turned_keys(self, k: Keys, turning: Turning) -> Tensor:
        if turning.key is not None:
            return turn(k, self._waves(turning.key, turning.divisor), self.rope.layout)
        if self.rope.scaling.factor == 1:
            return k
        return turn(k, self._waves(constant(0, turning.query), 1), self.rope.layout)

    def _waves(self, index: Index, divisor: int) -> Waves:
        angles = (index[..., None].float() * (self.rope.frequencies(index) / divisor))[:, None]
        return self.rope.scaling.factor * angles.cos(), self.rope.scaling.factor * angles.sin()

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both as they meet, where that is the same in all bands."""
        zones = self.zones(q, k, layout, state)
        if len(zones) > 1:
            raise NotImplementedError(
                "queries and keys of a stretched model meet in several bands, each with rotations of its own; call "
                "lw.unstretch(model) first"
            )
        return zones[0].q, zones[0].k

    def logit_scale(self, x: Tokens, layout: TokenLayout, *, window: Window | None = None) -> Tensor | None:
        """log n, if the spec says so."""
        return None if self.logn is None else self.logn.logit_scale(x, layout)

    def extra_repr(self) -> str:
        """The method and its numbers."""
        return repr(self.method)


def _with_scaling(rope: Rope, scaling: Mapping[str, object] | None, train_length: int) -> Rope:
    """The same RoPE with other frequencies; an error if they are scaled already."""
    if scaling is None:
        return rope
    if type(rope.scaling) is not SCALINGS["default"]:
        raise NotImplementedError(
            f"a scaling needs a RoPE without one, got {type(rope.scaling).__name__}; methods of bands, such as "
            "'self-extend:8', go with any"
        )
    scaled = copy.copy(rope)
    scaled.scaling = make_scaling(scaling, replace(rope.scaling.rope_base, train_length=train_length))
    scaled.length_dependent = scaled.scaling.length_dependent
    return scaled
