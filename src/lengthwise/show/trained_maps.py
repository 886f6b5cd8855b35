"""Maps of trained heads that come with the package, in trained_map_files/: written from runs once, read without any
model.

A file holds what the final layer's map is made of, for one sequence of held-out text: tables, levels and parameters as
they are, queries and keys in half precision where no picture shows it. It holds no text, and says where it comes from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from lengthwise.bias import Bias, LevelBias, SumBias
from lengthwise.inspect import position_views
from lengthwise.loading import INITIAL_LENGTH, LoadedModel, TokenSample, load_model, sample_tokens
from lengthwise.model.families import AttentionRecord
from lengthwise.rescore import HeadNetwork
from lengthwise.runs import Run
from lengthwise.show.options import SEQUENCES
from lengthwise.show.paper_figures import FIGURES, PaperFigure, figure_of
from lengthwise.show.structure import COLOURS, Structure
from lengthwise.views import LayerMap, PositionMaps, Quantity, load_maps
from lengthwise.views.described_scores import ContentScores, NetworkBias

FOLDER = Path(__file__).parent / "trained_map_files"
MOST_BYTES = 2_000_000
"""Of all files together."""


@dataclass(frozen=True)
class Source:
    """What a run does not say about itself: which text it read, under which licence, and the code's commit."""

    text: str
    licence: str
    commit: str


def load_trained(figure: PaperFigure, folder: Path | None = None) -> PositionMaps | None:
    """The trained maps of a figure; None where there are none."""
    path = (folder or FOLDER) / f"{figure.maps_name}.safetensors"
    if not path.is_file():
        return None
    maps = load_maps(path)
    # Levels are stored as steps; everything that draws wants their sums.
    layers = [replace(one, described=one.described and one.described.first_sequence()) for one in maps.maps]
    return replace(maps, maps=tuple(layers))


def origin_line(origin: Mapping[str, str | int | float]) -> str:
    """How a model was trained, in a sentence."""
    return (
        f"Trained on {origin['tokens']:,} tokens of {origin['text']} at length {origin['length']}, held-out loss "
        f"{origin['loss']:.3f} (commit {origin['commit']}, {origin['date']})."
    )


def write_trained(
    name: str | Path, source: Source, *, folder: Path | None = None, length: int = INITIAL_LENGTH, seed: int = 0
) -> str:
    """Write the maps of a finished run; returns what was written, with the structure that it has.

    length, seed    of the sequence of held-out text, and of two more to measure how far it depends on its tokens
    """
    run, loaded = Run(name), load_model(name)
    figure = figure_of(loaded.name, loaded.model.config)
    sample = sample_tokens(loaded, length=length, seed=seed, count=SEQUENCES)
    exact = described_maps(loaded, sample, figure)
    stored, error = in_half_precision(exact)
    maps = replace(stored, origin=_origin(run, loaded, source) | {"figure": figure.number, "rounding": error})
    path = maps.save((folder or FOLDER) / f"{figure.maps_name}.safetensors")
    structure = Structure.of(maps.maps[0])
    constant = f"; constant from distance {structure.constant_from} on" if structure.constant_from < length - 1 else ""
    return "\n".join(
        [
            f"{path.name} ({path.stat().st_size:,} bytes): {figure.encoding}, {maps.quantity}. "
            f"{origin_line(maps.origin)}",
            f"  {structure.sentence()}{constant}; stored to {error:.1e} of a head's range.",
            *(f"  Not as in Figure {figure.number}: {fault}." for fault in structure.deviations(figure)),
        ]
    )


def check_sizes(folder: Path | None = None) -> str:
    """How many bytes all files have together; an error if they are too many."""
    paths = [(folder or FOLDER) / f"{figure.maps_name}.safetensors" for figure in FIGURES]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if sum(sizes) > MOST_BYTES:
        raise ValueError(f"trained maps must have at most {MOST_BYTES:,} bytes in all, got {sum(sizes):,}")
    return f"{len(sizes)} of {len(FIGURES)} files, {sum(sizes):,} bytes."


def described_maps(loaded: LoadedModel, sample: TokenSample, figure: PaperFigure) -> PositionMaps:
    """The final layer of a model as what it is made of, for the first sequence of a sample, and without its text."""
    records: list[AttentionRecord] = []
    views = position_views(
        loaded.model, sample.ids, -1, [figure.quantity], shown="first", on_record=records.append, resolution=16
    )
    maps, (record,) = views[figure.quantity], records
    layer_map = replace(maps.maps[0], described=describe_record(record, figure.quantity), tiles=None)
    config = loaded.model.config
    shape = f"a GPT-2 of {config.n_layer} layers of {config.n_head} heads, width {config.n_embd}"
    return replace(maps, model=shape, encoding=figure.encoding, maps=(layer_map,))


@torch.no_grad()
def describe_record(record: AttentionRecord, quantity: Quantity) -> Bias:
    """The bias or the scores of a layer's first sequence, described."""
    changed = {"softcap": record.softcap, "logit_scale": record.logit_scale}
    unknown = [name for name, part in changed.items() if part is not None]
    if not isinstance(record.rescore, HeadNetwork | None) or quantity not in ("bias", "scores") or unknown:
        names = ", ".join([*unknown, type(record.rescore).__name__])
        raise NotImplementedError(f"{quantity} can be described by queries, keys and a HeadNetwork, got {names}")
    content = ContentScores(record.q, record.k, record.scale).first_sequence()
    # As steps, which take half the room of their sums.
    bias = Bias.first_sequence(record.bias) if isinstance(record.bias, LevelBias) else record.bias
    added: Bias | None = bias
    if record.rescore is not None:
        added = NetworkBias(content, record.rescore, bias, record.causal)
    if quantity == "scores":
        added = content if added is None else SumBias((content, added))
    assert added is not None
    return added.detached()


def in_half_precision(maps: PositionMaps) -> tuple[PositionMaps, float]:
    """The same with queries and keys in half precision where no picture shows it, and how far it is off.

    The error is the largest of all pairs as a part of its head's range; it is seen from half a colour on.
    """
    (exact,) = maps.maps
    assert exact.described is not None
    tensors = exact.described.tensors()
    halves = {name: x.half() for name, x in tensors.items() if name.rpartition(".")[2] in ("q", "k")}
    if not halves:
        return maps, 0.0
    rounded = replace(exact, described=exact.described.rebuilt(tensors | halves))
    error = _largest_error(rounded, exact)
    return (replace(maps, maps=(rounded,)), error) if error < 0.5 / COLOURS else (maps, 0.0)


def _largest_error(rounded: LayerMap, exact: LayerMap) -> float:
    values, wanted = rounded.values, exact.values
    visible = wanted.isfinite()
    ranges = wanted.where(visible, -torch.inf).amax((1, 2)) - wanted.where(visible, torch.inf).amin((1, 2))
    errors = (values - wanted).abs().where(visible, 0).amax((1, 2))
    return float((errors / ranges.clamp(min=torch.finfo(ranges.dtype).tiny)).max())


def _origin(run: Run, loaded: LoadedModel, source: Source) -> dict[str, str | int | float]:
    """Where a map comes from: what the run says, and what it does not."""
    last, length = run.metrics[-1], run.config["length"]
    trained = datetime.fromtimestamp((run.final / "seal.json").stat().st_mtime, UTC)
    return {
        "encoding": loaded.model.config.encoding,
        "text": source.text,
        "licence": f"{source.licence}; the maps hold no text",
        "length": length,
        "tokens": last["tokens"],
        "loss": last["held_out"][str(length)],
        "commit": source.commit,
        "date": trained.date().isoformat(),
    }
