"""`lengthwise show RUN --by-step`: how the heads of a run moved while it trained, from its snapshots."""

from collections.abc import Sequence
from dataclasses import replace

from lengthwise.runs import Run
from lengthwise.show.options import ShowOptions, parse_numbers
from lengthwise.views import PositionMaps, load_maps
from lengthwise.views.step_plot import chosen_steps, step_plot
from lengthwise.views.style import checked_path, save_picture


def show_steps(
    names: Sequence[str], options: ShowOptions | None = None, *, out: str | None = None, force: bool = False
) -> str:
    """Draw how the heads of a run moved in training, from its snapshots; returns what was drawn and where it is."""
    options = options or ShowOptions()
    given = {name: getattr(options, name) for name in ("detail", "part", "length", "text", "style", "quantity")}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"snapshots decide {name} themselves, got --{name} {value}; leave it out with --by-step")
    if options.seed:
        raise ValueError(f"--seed must be without --by-step: snapshots have their own text, got {options.seed}")
    if options.trust_remote_code:
        raise ValueError("--trust-remote-code must be without --by-step, which loads no model")
    if len(names) != 1 or not Run.is_run(names[0]):
        raise ValueError(f"--by-step must be of one run of `lengthwise train`, got {', '.join(names) or 'none'}")
    run = Run(names[0])
    path = checked_path(out or f"{run.name}-by-step.png", force=force)
    layers = options.layers("last")
    if isinstance(layers, str) or len(layers) != 1:
        raise ValueError(f"--by-step must be of one layer, got --layer {options.layer}")
    heads = None if options.heads is None else parse_numbers("heads", options.heads)
    snapshots = layer_snapshots(run, None if layers == [-1] else layers[0])
    save_picture(step_plot(snapshots, heads=heads), path, force=force)
    steps = ", ".join(f"{step:,}" for step in chosen_steps(sorted(snapshots)))
    return f"{snapshots[max(snapshots)].title}, after step {steps}.\nWrote {path}."


def layer_snapshots(run: Run, layer: int | None = None) -> dict[int, PositionMaps]:
    """One layer of a run's snapshots, the last if none is named, by their steps."""
    return {step: maps.only(layer) for step, maps in run_snapshots(run).items()}


def run_snapshots(run: Run) -> dict[int, PositionMaps]:
    """The maps that a run saved while it trained, by their steps."""
    stored = {int(path.stem.removeprefix("step-")): load_maps(path) for path in run.maps}
    return {step: replace(maps, model=run.name) for step, maps in stored.items()}
