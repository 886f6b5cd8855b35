"""`lengthwise show --paper`: figures 8 to 15 of the CABLE paper, of trained heads.

Those of runs that are given, else those that come with the package, for which no model is built or run; what neither
has is drawn at its initial parameters, and said to be.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.files import check_folder_to_write, write_atomic
from lengthwise.inspect import position_maps
from lengthwise.loading import INITIAL_LENGTH, LoadedModel, TokenSample, initial_model, load_model, sample_tokens
from lengthwise.show.options import SEQUENCES, Style
from lengthwise.show.paper_figures import FIGURES, PaperFigure, figure_of
from lengthwise.show.trained_maps import load_trained, origin_line
from lengthwise.views import PositionMaps
from lengthwise.views.style import FORMATS, checked_path, save_picture

HELD_OUT = "held-out text"
Samples = dict[tuple[str, int, str, str], TokenSample]
"""By vocabulary, its size, and text: models that read alike read the same."""

NOT_TRAINED = "not trained: at its initial parameters"


def show_paper(
    names: Iterable[str] = (),
    *,
    out: str | None = None,
    style: Style | None = None,
    initial: bool = False,
    seed: int = 0,
    force: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Draw all figures into a folder; returns what each one is of.

    names       runs and checkpoints, whose figures are drawn from them
    initial     draw the others at their initial parameters, and not from the trained maps of the package
    seed        of the text that models read, and of initial parameters; trained maps have a text of their own
    """
    folder = Path(out or "paper-figures")
    check_folder_to_write(folder)
    if folder.suffix.lower() in (".html", *(f".{name}" for name in FORMATS)) and not folder.exists():
        raise ValueError(
            f"--paper draws {len(FIGURES)} figures, so that --out must be a folder, got {out!r}, the name of a file; "
            f"use e.g. --out {folder.with_suffix('')}"
        )
    for figure in FIGURES:
        checked_path(folder / f"{figure.name}.png", force=force)
    loaded = [load_model(name, seed=seed, trust_remote_code=trust_remote_code) for name in names]
    if seed and not loaded and not initial:
        raise ValueError(f"--seed must be with runs or --initial, since trained maps have their own text, got {seed}")
    given: dict[PaperFigure, LoadedModel] = {}
    for one in loaded:
        figure = figure_of(one.name, one.model.config)
        if figure in given:
            raise ValueError(
                f"names must be of one model for each figure, got {given[figure].name} and {one.name}, both with "
                f"{figure.encoding!r}"
            )
        given[figure] = one
    samples: Samples = {}
    lines = ["# The figures of the CABLE paper, drawn anew", ""]
    for figure in FIGURES:
        trained = None if initial or figure in given else load_trained(figure)
        shown, text = figure, HELD_OUT
        if trained is not None:
            maps, state = trained, "trained: comes with the package"
        else:
            model = given.get(figure) or initial_model(figure.encoding, figure.options, seed=seed)
            shown = figure.of_config(model.model.config)
            sample = _sample(model, samples, seed)
            maps, text = _model_maps(figure, model, sample), sample.description
            state = f"trained: {model.name}{_own_length(model)}" if model.trained else NOT_TRAINED
            state += "" if model.trained or initial else f", since no trained maps of {figure.encoding} are at hand"
        path = save_picture(draw(shown, maps, state, style, text), folder / f"{figure.name}.png", force=force)
        lines.append(f"- Figure {figure.number}, [{path.name}]({path.name}) ({state}). {shown.caption}{training(maps)}")
    write_atomic(folder / "README.md", "\n".join(lines) + "\n")
    return "\n".join([*lines[2:], f"Wrote {len(FIGURES)} figures and README.md to {folder}."])


def draw(
    figure: PaperFigure, maps: PositionMaps, state: str = "", style: Style | None = None, text: str = HELD_OUT
) -> Figure:
    """One figure; its caption says what was read, and how the model was trained or, if nobody knows, `state`."""
    if style == "annotated":
        trained = f", trained on {maps.origin['tokens']:,} tokens" if maps.origin else ""
        return replace(maps, model=maps.model + trained).figure()
    (layer_map,) = maps.maps
    caption = (
        f"Figure {figure.number}. {figure.caption} The {maps.quantity} of all {maps.heads} heads in the final layer of "
        f"{maps.model}, on {layer_map.queries} tokens of {text}; query down, key across."
        f"{training(maps) or f' {state[:1].upper()}{state[1:]}.'}"
    )
    return maps.paper_figure(caption=caption)


def training(maps: PositionMaps) -> str:
    """How a model that is not there any more was trained, as a further sentence."""
    return f" {origin_line(maps.origin)}" if maps.origin else ""


def _own_length(model: LoadedModel) -> str:
    """The length that a model was trained at, where its figure is of another."""
    return "" if model.train_length == INITIAL_LENGTH else f", at length {model.train_length}"


def _sample(loaded: LoadedModel, samples: Samples, seed: int) -> TokenSample:
    """What a model reads."""
    text = (loaded.vocabulary, loaded.model.config.vocab_size, loaded.source, loaded.split)
    if text not in samples:
        samples[text] = sample_tokens(loaded, length=INITIAL_LENGTH, seed=seed, count=SEQUENCES)
    return samples[text]


def _model_maps(figure: PaperFigure, loaded: LoadedModel, sample: TokenSample) -> PositionMaps:
    """A model's maps, computed."""
    maps = position_maps(loaded.model, sample.ids, quantity=figure.quantity, shown="first", tokens=sample.tokens)
    return replace(maps, model=loaded.name, encoding=figure.encoding)
