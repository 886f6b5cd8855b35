"""What a map shows, in numbers: its range, whether it follows distance or tokens, and from where on it is constant."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lengthwise.show.paper_figures import PaperFigure
from lengthwise.views import LayerMap
from lengthwise.views.style import format_number

COLOURS = 256
"""How many a picture has: a part of a head's range that is smaller than one of them cannot be seen."""


@dataclass(frozen=True)
class Structure:
    """Numbers of one layer, a number per head but for the last."""

    least: Sequence[float]
    greatest: Sequence[float]
    context: Sequence[float]
    """The spread over sequences at the same query and key."""
    diagonals: Sequence[float]
    """The widest range along one diagonal, measured on the map as it is drawn."""
    constant_from: int
    """The distance from which on the mean of every head stays the same, to the last bit."""
    uniform_to: int
    """The last query up to which every diagonal of every head is uniform, to the last bit."""

    @classmethod
    def of(cls, layer_map: LayerMap) -> "Structure":
        """That of a layer whose map has every number."""
        values = layer_map.values
        visible = values.isfinite()
        along = [values.diagonal(-distance, 1, 2) for distance in range(layer_map.queries)]
        widths = torch.stack([diagonal.amax(1) - diagonal.amin(1) for diagonal in along])
        profile = layer_map.profile.mean[:, -layer_map.profile.first :]
        changes = (profile != profile[:, -1:]).any(0).nonzero()
        # A query sees one distance more than the one before it, and for the others the same keys, moved by one.
        differs = [bool((values[:, i, 1 : i + 1] != values[:, i - 1, :i]).any()) for i in range(1, layer_map.queries)]
        return cls(
            values.where(visible, torch.inf).amin((1, 2)).tolist(),
            values.where(visible, -torch.inf).amax((1, 2)).tolist(),
            layer_map.context_dependence.tolist(),
            widths.amax(0).tolist(),
            int(changes[-1]) + 1 if len(changes) else 0,
            differs.index(True) if any(differs) else layer_map.queries - 1,
        )

    def seen(self, numbers: Sequence[float]) -> list[bool]:
        """Whether numbers of each head are more than one colour of its picture."""
        ranges = [high - low for low, high in zip(self.least, self.greatest, strict=True)]
        return [x > width / COLOURS for x, width in zip(numbers, ranges, strict=True)]

    def deviations(self, figure: PaperFigure) -> list[str]:
        """Where it is not what the paper's figure shows, in words; none if all is as it should be."""
        faults = []
        by_tokens, along_diagonals = self.seen(self.context), self.seen(self.diagonals)
        if figure.follows != "tokens" and any(by_tokens):
            faults.append(f"context must be 0, got up to {max(self.context):.3g}")
        if figure.follows == "distance" and any(along_diagonals):
            faults.append(f"diagonals must be uniform, got ranges up to {max(self.diagonals):.3g} along one")
        if figure.follows == "tokens" and not any(by_tokens):
            faults.append(f"some head must follow the tokens, got a context of at most {max(self.context):.3g}")
        if figure.constant_from is not None and self.constant_from > figure.constant_from:
            faults.append(f"it must be constant from distance {figure.constant_from} on, got {self.constant_from}")
        return faults

    def sentence(self) -> str:
        """The numbers in words."""
        context = _span(self.context) if any(self.context) else "0 in every head"
        diagonals = _span(self.diagonals) if any(self.diagonals) else "0 in every head"
        return (
            f"Least values {_span(self.least)}, greatest {_span(self.greatest)} over the heads; context {context}, "
            f"widest range along a diagonal {diagonals}"
        )


def _span(numbers: Sequence[float]) -> str:
    """The least and the greatest of some numbers.

    >>> _span([-1.0, -2.5]), _span([0.0, 0.0]), _span([-1703.2])
    ('−2.5 to −1', '0', '−1,703')
    """
    low, high = (format_number(x) for x in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
