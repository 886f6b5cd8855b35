"""A run's folder as it is read: by evaluation, pictures, studies and the server."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lengthwise.runs.sealed import is_sealed

CONFIG, METRICS, CHECKPOINTS, MAPS, FINAL, LOCK = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "maps",
    "final",
    ".lock",
)


class Run:
    """One run. Nothing is read until it is asked for, and everything anew each time: a run may be going on."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"a run is a folder with {CONFIG}; {self.folder} has none. Name the folder given as --out."
            )

    @staticmethod
    def is_run(folder: str | Path) -> bool:
        """Whether a folder is a run's."""
        return (Path(folder) / CONFIG).is_file()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """What the run was started with."""
        return read_config(self.folder / CONFIG)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary a step, in order; a last line that is still being written is left out."""
        return list(read_metrics(self.folder / METRICS))

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that were written to their end, oldest first."""
        return sorted(path for path in (self.folder / CHECKPOINTS).glob("step-*") if is_sealed(path))

    @property
    def final(self) -> Path:
        """The trained model's folder, for from_pretrained; an error while there is none."""
        if not self.is_finished:
            raise FileNotFoundError(
                f"{self.folder} must be finished to have a final model; it is not. "
                + ("Wait for it." if self.is_being_written else "Go on with: lengthwise train --resume --out ...")
            )
        return self.folder / FINAL

    @property
    def maps(self) -> list[Path]:
        """The snapshots of the position maps, in order, for `lengthwise.views.load_maps`."""
        return sorted((self.folder / MAPS).glob("step-*.safetensors"))

    def map_path(self, step: int) -> Path:
        """Where the snapshot of a step is, or will be."""
        return self.folder / MAPS / f"step-{step:08d}.safetensors"

    @property
    def is_finished(self) -> bool:
        """Whether the final model is there."""
        return is_sealed(self.folder / FINAL)

    @property
    def is_being_written(self) -> bool:
        """Whether a process is writing to it now; the lock ends with its process, however that ends."""
        lock = self.folder / LOCK
        if not lock.exists():
            return False
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


def read_config(path: Path) -> dict[str, Any]:
    """A config file; only plain values, never objects."""
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be YAML of plain values; it cannot be read: {error}. Mend it.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must have a value for each name; it has a {type(found).__name__}. Mend it.")
    return found


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file that are whole."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise ValueError(
                        f"{path} must have one JSON object a line; {line[:60]!r} is none. Remove that line."
                    ) from None
