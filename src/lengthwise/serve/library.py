"""Which models a server offers: encodings, and the runs, checkpoints and studies that it was given.

Folders are read anew whenever somebody asks, since runs come and go. What a browser sends is only ever compared with
these names, so no path of its making is opened.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lengthwise.encodings import ENCODINGS
from lengthwise.runs import Run
from lengthwise.runs.run import FINAL
from lengthwise.runs.sealed import is_sealed

STUDY = "study.json"
USUAL = ("runs", "study")
"""Where `lengthwise train` and `lengthwise study` write if they are not told otherwise."""


class Library:
    """The models by the names that the page shows."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.sources = list(sources)
        for source in self.sources:
            if source not in ENCODINGS and Path(source).is_dir() and not any(self._below(Path(source))):
                raise ValueError(
                    f"a source must be a run, a checkpoint, a study or a folder of them; {source} holds none. "
                    "Name another, or leave it out."
                )

    def runs(self) -> dict[str, Path]:
        """Runs by name, the folder before it where two have the same."""
        return _named(path for path in self._all() if Run.is_run(path))

    def checkpoints(self) -> dict[str, str]:
        """Checkpoint folders by name, and names on the hub as they are."""
        found = _named(path for path in self._all() if not Run.is_run(path) and _is_checkpoint(path))
        hub = [name for name in self.sources if not Path(name).exists() and name not in ENCODINGS]
        return {name: str(path) for name, path in found.items()} | {name: name for name in hub}

    def source(self, name: str) -> str:
        """What `find_subject` takes for a name that the page shows, or an error."""
        runs, checkpoints = self.runs(), self.checkpoints()
        if name in runs:
            return str(runs[name])
        if name in checkpoints:
            return checkpoints[name]
        if name in ENCODINGS:
            return name
        raise LookupError(f"a model must be one that is offered; {name!r} is not, or not any more. Choose another.")

    def groups(self) -> list[dict[str, Any]]:
        """The names, for the page to choose from."""
        return [
            {"label": "runs", "names": [name for name, path in self.runs().items() if is_sealed(path / FINAL)]},
            {"label": "checkpoints", "names": list(self.checkpoints())},
            {"label": "encodings at their initial parameters", "names": list(ENCODINGS)},
        ]

    def tables(self) -> list[dict[str, Any]]:
        """The runs with how far they are, and the table of every study."""
        rows = [_run_row(name, path) for name, path in self.runs().items()]
        head = ["run", "encoding", "step", "loss", "state"]
        found = [{"title": "Runs", "head": head, "rows": rows}] if rows else []
        studies = dict.fromkeys(path for root in self._roots() for path in (root, *_folders(root)))
        return found + [table for path in studies for table in _study_table(path)]

    def _roots(self) -> list[Path]:
        given = [Path(source) for source in self.sources or USUAL]
        return [path for path in given if path.is_dir()]

    def _all(self) -> Iterator[Path]:
        for root in self._roots():
            yield from self._below(root)

    @staticmethod
    def _below(root: Path) -> Iterator[Path]:
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


def _named(paths: Iterator[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        whole = path.resolve()
        name = whole.name if whole.name not in found else f"{whole.parent.name}/{whole.name}"
        found.setdefault(name, path)
    return found


def _run_row(name: str, path: Path) -> list[str]:
    """A run in a line; a run that is damaged or going away is shown as such and hides no other."""
    try:
        run = Run(path)
        config, metrics = run.config, run.metrics
        last = metrics[-1] if metrics else {}
        now = "finished" if run.is_finished else "being trained" if run.is_being_written else "stopped"
    except (OSError, ValueError) as fault:
        return [name, "", "", "", f"cannot be read: {fault}"]
    loss = f"{last['loss']:.3f}" if isinstance(last.get("loss"), float) else ""
    return [name, str(config.get("encoding", "")), f"{last.get('step', 0):,}", loss, now]


def _study_table(folder: Path) -> list[dict[str, Any]]:
    """The table that a study wrote, if there is one."""
    try:
        said = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        lengths = sorted({int(length) for row in said["rows"] for length in row["values"]})
        rows = [
            [row["encoding"], *(_figure(row["values"].get(str(length))) for length in lengths)] for row in said["rows"]
        ]
        title = f"{folder.name}: {str(said['metric']).replace('_', ' ')} by length, trained at {said['train_length']:,}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [{"title": title, "head": ["encoding", *(f"{length:,}" for length in lengths)], "rows": rows}]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
