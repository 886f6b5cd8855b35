"""Figures 8 to 15 of the CABLE paper (Veisi et al. 2025, arXiv 2503.08067), all of them from one command.

Every figure is the final layer of a GPT-2 Small with 12 heads on one randomly sampled sequence of 512 tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lengthwise.files import write_atomic
from lengthwise.inspect import position_maps
from lengthwise.loading import INITIAL_LENGTH, LoadedModel, TokenSample, initial_model, load_model, sample_tokens
from lengthwise.model import LengthwiseConfig
from lengthwise.show.options import SEQUENCES
from lengthwise.views import Quantity
from lengthwise.views.style import checked_path, save_picture


@dataclass(frozen=True)
class PaperFigure:
    """One figure: its encoding, what is drawn, and what a reader should see once it is trained."""

    number: int
    encoding: str
    caption: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quantity: Quantity = "bias"

    @property
    def name(self) -> str:
        """The file name without its suffix."""
        return f"figure-{self.number:02}-{self.encoding.replace('+', '-')}"

    def is_of(self, config: object) -> bool:
        """Whether a model's encoding is this figure's."""
        return isinstance(config, LengthwiseConfig) and config.encoding == self.encoding


FIGURES = (
    PaperFigure(8, "cable", "CABLE's bias follows the tokens: rows differ with what they have read."),
    PaperFigure(
        9,
        "cable+dapev2",
        "DAPEv2 over CABLE: what it adds to the content in all, which follows the tokens.",
    ),
    PaperFigure(10, "kerple", "Kerple's logarithm of the distance: uniform along diagonals, 0 on the main one."),
    PaperFigure(
        11,
        "kerple+dapev2",
        "DAPEv2 over Kerple: what it adds in all; the correction makes a bias of distance follow the tokens.",
    ),
    PaperFigure(12, "alibi", "ALiBi: a straight line in the distance, steepest in the first head; nothing is learned."),
    PaperFigure(13, "fire", "FIRE: a small network of the relative distance, uniform along diagonals up to its L."),
    PaperFigure(14, "t5-clamped", "T5's bias: a learned number for each distance, constant beyond the last."),
    PaperFigure(
        15,
        "rope",
        "RoPE adds no bias, so these are the scores themselves, which follow the content.",
        {"layout": "interleaved"},
        "scores",
    ),
)


def show_paper(
    names: Iterable[str] = (),
    *,
    out: str | None = None,
    seed: int = 0,
    force: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Draw all figures into a folder, of trained models where they are given; returns what each one is of."""
    folder = Path(out or "paper-figures")
    if folder.is_file():
        raise NotADirectoryError(f"--out must be a folder for the figures, got the file {folder}")
    for figure in FIGURES:
        checked_path(folder / f"{figure.name}.png", force=force)
    trained = [load_model(name, seed=seed, trust_remote_code=trust_remote_code) for name in names]
    for loaded in trained:
        if not any(figure.is_of(loaded.model.config) for figure in FIGURES):
            encoding = getattr(loaded.model.config, "label", "another model")
            known = ", ".join(dict.fromkeys(figure.encoding for figure in FIGURES))
            raise ValueError(
                f"a model for the paper's figures must have one of their encodings, {known}, got {loaded.name} with "
                f"{encoding!r}"
            )
    lines = ["# The figures of the CABLE paper, drawn anew", ""]
    samples: dict[tuple[str, str, str], TokenSample] = {}  # models that read alike read the same
    for figure in FIGURES:
        loaded = next((loaded for loaded in trained if figure.is_of(loaded.model.config)), None) or initial_model(
            figure.encoding, figure.options, seed=seed
        )
        text = (loaded.vocabulary, loaded.source, loaded.split)
        if text not in samples:
            samples[text] = sample_tokens(loaded, length=INITIAL_LENGTH, seed=seed, count=SEQUENCES)
        lines.append(_draw(figure, loaded, samples[text], folder, force=force))
    write_atomic(folder / "README.md", "\n".join(lines) + "\n")
    return "\n".join([*lines[2:], f"Wrote {len(FIGURES)} figures and README.md to {folder}."])


def _draw(figure: PaperFigure, loaded: LoadedModel, sample: TokenSample, folder: Path, *, force: bool) -> str:
    maps = position_maps(loaded.model, sample.ids, quantity=figure.quantity, shown="first", tokens=sample.tokens)
    maps = replace(maps, model=loaded.name)
    path = save_picture(maps.figure(), folder / f"{figure.name}.png", force=force)
    state = f"trained: {loaded.name}" if loaded.trained else "not trained: at its initial parameters"
    return f"- Figure {figure.number}, [{path.name}]({path.name}) ({state}). {figure.caption}"
