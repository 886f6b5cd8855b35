"""Reading the folder of a run: for evaluation, figures, studies and the server."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lengthwise.errors import describe
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
    """One run. Everything is read on access and anew each time, since a run may still be training."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"a run must be a folder with {CONFIG}, the one given as --out, got {self.folder}, which has none"
            )

    @staticmethod
    def is_run(folder: str | Path) -> bool:
        """Whether a folder is a run's."""
        return (Path(folder) / CONFIG).is_file()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The config that the run was started with."""
        return read_config(self.folder / CONFIG)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary a step, in order; a last line that is still being written is left out."""
        return list(read_metrics(self.folder / METRICS))

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are complete, oldest first."""
        return sorted(path for path in (self.folder / CHECKPOINTS).glob("step-*") if is_sealed(path))

    @property
    def final(self) -> Path:
        """The trained model's folder, for from_pretrained; an error while there is none."""
        if not self.is_finished:
            raise FileNotFoundError(
                f"a run must be finished to have a final model, got {self.folder}, which "
                + ("is being trained" if self.is_being_written else "is not; resume it with lengthwise train --resume")
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
        """Whether a process is writing to it now; the lock ends with the process, in whatever way it ends."""
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
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be YAML of plain values, got what cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a YAML mapping from names to values, got {describe(config)}")
    return config


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    raise ValueError(f"{path} must have one JSON object a line, got {line[:60]!r}") from None
