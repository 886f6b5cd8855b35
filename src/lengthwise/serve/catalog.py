"""The models that a server offers: encodings, and the runs, checkpoints and studies that it was given.

Folders are read anew for every request, since runs come and go. What a browser sends is only ever compared with these
names: no path from a browser is opened.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lengthwise.encodings import ENCODINGS
from lengthwise.encodings.registry import is_encoding
from lengthwise.files import missing_path
from lengthwise.loading import resolve_checkpoint
from lengthwise.runs import Run

STUDY = "study.json"
DEFAULT_FOLDERS = ("runs", "study")
"""Where `lengthwise train` and `lengthwise study` write by default."""

POINTS = 60
"""How many points a run's curve of losses has at most."""


class Catalog:
    """The models by the names that the page shows."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = list(sources)
        for source in self.sources:
            empty = Path(source).is_dir() and not any(self._models_in(Path(source)))
            if not is_encoding(source) and (fault := missing_path(source) or ("it has none" if empty else None)):
                raise ValueError(f"expected a run, a checkpoint, a study or a folder of them, got {source}: {fault}")
        # A folder that goes away later is not on the hub.
        self.on_hub = [name for name in self.sources if not Path(name).exists() and not is_encoding(name)]
        for name in self.on_hub:
            resolve_checkpoint(name)

    def runs(self) -> dict[str, Path]:
        """Runs by name, with folders above where another has the same."""
        return {name: path for name, path in self._named().items() if Run.is_run(path)}

    def checkpoints(self) -> dict[str, str]:
        """Checkpoint folders by name, and names on the hub as they are."""
        folders = {name: str(path) for name, path in self._named().items() if not Run.is_run(path)}
        return folders | {name: name for name in self.on_hub}

    def _named(self) -> dict[str, Path]:
        """Runs and checkpoints by their folder, with as many above it as tell it from others and from encodings."""
        named: dict[str, Path] = {}
        for path in dict.fromkeys(path.resolve() for path in self._models()):
            endings = ("/".join(path.parts[-count:]) for count in range(1, len(path.parts)))
            name = next((name for name in endings if name not in named and not is_encoding(name)), str(path))
            named[name] = path
        return named

    def source(self, name: str) -> str:
        """What `load_model` takes for a name that the page shows, or an error."""
        runs, checkpoints = self.runs(), self.checkpoints()
        if name in runs:
            return str(runs[name])
        if name in checkpoints:
            return checkpoints[name]
        if is_encoding(name):
            return name
        raise LookupError(f"model must be one that is offered now, got {name!r}")

    def groups(self) -> list[dict[str, Any]]:
        """The names of models that can be looked at, the first of which the page opens with."""
        finished = [name for name, path in self.runs().items() if _is_finished(path)]
        groups = {"runs": finished, "checkpoints": list(self.checkpoints())}
        named = [source for source in self.sources if is_encoding(source)]
        groups["encodings at their initial parameters"] = list(dict.fromkeys([*named, *ENCODINGS]))
        return [{"label": label, "names": names} for label, names in groups.items()]

    def cards(self) -> dict[str, list[dict[str, Any]]]:
        """The runs with how far they are, and the table of every study."""
        runs = [_run_card(name, path) for name, path in self.runs().items()]
        folders = dict.fromkeys(path for root in self._roots() for path in (root, *_folders(root)))
        return {"runs": runs, "studies": [card for path in folders for card in _study_card(path)]}

    def _roots(self) -> list[Path]:
        return [path for path in map(Path, self.sources or DEFAULT_FOLDERS) if path.is_dir()]

    def _models(self) -> Iterator[Path]:
        for root in self._roots():
            yield from self._models_in(root)

    @staticmethod
    def _models_in(root: Path) -> Iterator[Path]:
        """A folder itself, or the runs and checkpoints in it and in its folder `runs`."""
        if Run.is_run(root) or _is_checkpoint(root):
            yield root
            return
        for path in (*_folders(root), *_folders(root / "runs")):
            if Run.is_run(path) or _is_checkpoint(path):
                yield path


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file()


def _is_finished(path: Path) -> bool:
    try:
        return Run(path).is_finished
    except OSError:
        return False


def _run_card(name: str, path: Path) -> dict[str, Any]:
    """A run and how far it is; one that is damaged or going away says so and hides no other."""
    try:
        run = Run(path)
        config, metrics, finished = run.config, run.metrics, run.is_finished
        state = "finished" if finished else "training now" if run.is_being_written else "stopped"
    except (OSError, ValueError) as error:
        return {"name": name, "state": f"cannot be read: {error}", "finished": False, "losses": []}
    losses = [line["loss"] for line in metrics if isinstance(line.get("loss"), float)]
    # JSON has no NaN, and neither has a curve.
    curve = [loss for loss in losses if math.isfinite(loss)]
    return {
        "name": name,
        "encoding": str(config.get("encoding") or config.get("layers") or ""),
        "step": int(metrics[-1].get("step", 0)) if metrics else 0,
        "steps": config.get("steps") if isinstance(config.get("steps"), int) else None,
        "loss": f"{losses[-1]:.3f}" if losses else "",
        "state": state,
        "finished": finished,
        "losses": _some(curve, POINTS),
    }


def _some(values: list[float], most: int) -> list[float]:
    """At most so many, evenly apart, the first and the last among them."""
    count = min(most, len(values))
    return [values[n * (len(values) - 1) // max(1, count - 1)] for n in range(count)]


def _study_card(folder: Path) -> list[dict[str, Any]]:
    """The table that a study wrote, if there is one."""
    try:
        study = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        lengths = sorted({int(length) for row in study["rows"] for length in row["values"]})
        rows = [
            [row["encoding"], *(_number(row["values"].get(str(length))) for length in lengths)] for row in study["rows"]
        ]
        metric, train_length = str(study["metric"]).replace("_", " "), study["train_length"]
        title = f"{folder.resolve().name}: {metric} by length, trained at {train_length:,}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [{"title": title, "head": ["encoding", *(f"{length:,}" for length in lengths)], "rows": rows}]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
