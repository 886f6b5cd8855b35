"""Figures 8 to 15 of the CABLE paper (Veisi et al. 2025, arXiv 2503.08067): what each of them is of.

Every figure is the final layer of a GPT-2 Small with 12 heads on one randomly sampled sequence of 512 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lengthwise.model import LengthwiseConfig
from lengthwise.views import Quantity

Follows = Literal["distance", "positions", "tokens"]


@dataclass(frozen=True, eq=False)
class PaperFigure:
    """One figure: its encoding, what is drawn, and what a reader should see once it is trained."""

    number: int
    encoding: str
    caption: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quantity: Quantity = "bias"
    follows: Follows = "distance"
    """What decides a value: the distance alone, both positions, or the tokens too."""
    printed: str = ""
    """The range that the paper's figure has, where it can be read off."""
    constant_from: int | None = None
    """The distance from which on the bias is constant, where it has one."""

    @property
    def maps_name(self) -> str:
        """The file name of its trained maps without the suffix."""
        return self.encoding.replace("+", "-")

    @property
    def name(self) -> str:
        """The file name of the figure without the suffix."""
        return f"figure-{self.number:02}-{self.maps_name}"

    def is_of(self, config: object) -> bool:
        """Whether a model's encoding is this figure's."""
        return isinstance(config, LengthwiseConfig) and config.encoding == self.encoding

    def of_config(self, config: object) -> "PaperFigure":
        """The same with a caption that names a model's own options, of which what the paper's says may be false."""
        given = getattr(config, "encoding_options", None) or {}
        own = {name: value for name, value in given.items() if self.options.get(name) != value}
        if not own:
            return self
        return replace(self, caption=f"{self.encoding} with {', '.join(f'{k}={v!r}' for k, v in own.items())}.")


FIGURES = (
    PaperFigure(8, "cable", "CABLE's bias follows the tokens: rows differ with what they have read.", follows="tokens"),
    PaperFigure(
        9,
        "cable+dapev2",
        "DAPEv2 over CABLE: what it adds to the content in all, which follows the tokens.",
        follows="tokens",
    ),
    PaperFigure(
        10,
        "kerple",
        "Kerple's logarithm of the distance: uniform along diagonals, 0 on the main one.",
        printed="least values of about \N{MINUS SIGN}8.5 to \N{MINUS SIGN}1.7",
    ),
    PaperFigure(
        11,
        "kerple+dapev2",
        "DAPEv2 over Kerple: what it adds in all; the correction makes a bias of distance follow the tokens.",
        follows="tokens",
    ),
    PaperFigure(
        12,
        "alibi",
        "ALiBi: a straight line in the distance, steepest in the first head; nothing is learned.",
        printed="least values of \N{MINUS SIGN}321.9 to \N{MINUS SIGN}2.0",
    ),
    PaperFigure(
        13,
        "fire",
        "FIRE: a small network of the relative distance, uniform along diagonals up to its L.",
        follows="positions",  # beyond its L, which is learned, rows are stretched
        printed="all values negative, about \N{MINUS SIGN}7 to \N{MINUS SIGN}2.2",
    ),
    PaperFigure(
        14,
        "t5-clamped",
        "T5's bias: a learned number for each distance, constant beyond the last.",
        printed="values of about \N{MINUS SIGN}1.5 to 1",
        constant_from=256,
    ),
    PaperFigure(
        15,
        "rope",
        "RoPE adds no bias, so these are the scores themselves, which follow the content.",
        {"layout": "interleaved"},
        "scores",
        follows="tokens",
        printed="values of about \N{MINUS SIGN}15 to 15",
    ),
)


def figure_of(name: str, config: object) -> PaperFigure:
    """The figure of a model's encoding, or an error that names those that there are."""
    for figure in FIGURES:
        if figure.is_of(config):
            return figure
    known = ", ".join(dict.fromkeys(figure.encoding for figure in FIGURES))
    raise ValueError(
        f"a model for the paper's figures must have one of their encodings, {known}, got {name} with "
        f"{getattr(config, 'label', 'another model')!r}"
    )
