"""A run is a folder; only this file reads and writes it.

config.yaml         the whole config of the run; `lengthwise train --config` repeats it
metrics.jsonl       one JSON object a step: step, loss, tokens, seconds, lr, gradient, and held_out at some; from a
                    device every --log-every steps at once
checkpoints/        step-00000100/ and so on: the last few, for `--resume`
maps/               snapshots of the position maps, with --maps-every
final/              the trained model with its tokenizer, as `save_pretrained` writes it

`Run` reads it: for evaluation, figures, studies and the server. `RunWriter` writes it, one process at a time. Folders
inside are complete or absent, whatever happens while they are written: a folder is filled under another name; every
file is hashed and flushed to disk, SEAL with the hashes last; then it is renamed, which is atomic, and the rename is
flushed to disk. A folder under its own name was complete; the hashes show whether it still is.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from lengthwise.errors import describe
from lengthwise.files import file_hash, flush, replacing, write_atomic

__all__ = ["Run", "RunWriter"]

CONFIG, METRICS, CHECKPOINTS, MAPS, FINAL, LOCK = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "maps",
    "final",
    ".lock",
)
SEAL = "seal.json"
PARTIAL, DAMAGED, OLD = ".partial", ".damaged", ".old"
log = logging.getLogger(__name__)
PATIENCE = 1.0
"""Seconds to wait for the lock: a reader that checks whether it is held holds it for a moment itself."""


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
        return _sealed_checkpoints(self.folder)

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
    def born(self) -> list[dict[str, Any]]:
        """Each call that trained it, once it is finished: command, commit, machine, versions, date, and its first step.

        None of a run that was trained before they were stored.
        """
        calls: list[dict[str, Any]] = json.loads((self.final / SEAL).read_text()).get("born", [])
        return calls

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
            return not _take_lock(file, fcntl.LOCK_SH)


def _take_lock(file: TextIOWrapper, kind: int) -> bool:
    """Take a lock at once, or tell that another process has it; an error on a disk that has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(
            error.errno,
            f"a run must be on a disk that can lock files, got {error.strerror}; choose another --out",
            file.name,
        ) from None
    return True


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


def begin(target: Path) -> Path:
    """An empty folder to fill, which `seal` will rename to `target`."""
    partial = target.with_name(target.name + PARTIAL)
    discard(partial)
    partial.mkdir(parents=True)
    return partial


def seal(partial: Path, note: dict[str, Any]) -> Path:
    """Flush a filled folder to disk and give it its own name, with a note in its seal."""
    hashes = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        flush(path)
        hashes[path.relative_to(partial).as_posix()] = file_hash(path)
    (partial / SEAL).write_text(json.dumps({**note, "sha256": hashes}, indent=1) + "\n")
    flush(partial / SEAL)
    for folder in [*(p for p in partial.rglob("*") if p.is_dir()), partial]:
        flush(folder)
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    os.rename(partial, target)
    flush(target.parent)
    return target


def is_sealed(folder: Path) -> bool:
    """Whether a folder was completed."""
    return not folder.name.endswith((PARTIAL, DAMAGED, OLD)) and (folder / SEAL).is_file()


def read_seal(folder: Path) -> dict[str, Any]:
    """The note and the hashes of a folder; a ValueError with the reason if it is damaged."""
    try:
        contents: dict[str, Any] = json.loads((folder / SEAL).read_text())
        hashes = contents["sha256"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"its seal cannot be read ({type(error).__name__}: {error})") from None
    for name, expected in hashes:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"its seal names {name!r}, which is outside of it")
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if file_hash(path) != expected:
            raise ValueError(f"the checksum of {name} differs from that in its seal")
    return contents


def discard(folder: Path) -> None:
    """Remove a folder so that a kill meanwhile leaves nothing under its own name."""
    if folder.exists():
        old = folder.with_name(folder.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
        shutil.rmtree(old)


class RunWriter:
    """The right to write to a run's folder, held until it is closed or the process ends."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / LOCK).open("a")
        try:
            is_ours = self._try_lock()
        except OSError:
            self._lock.close()
            raise
        if not is_ours:
            self._lock.close()
            raise BlockingIOError(
                f"a run must have one writer at a time, got {self.folder}, which another process is writing to; wait "
                "for it, or choose another --out"
            )
        checkpoints = self.folder / CHECKPOINTS
        for leftover in [*checkpoints.glob(f"*{PARTIAL}"), *checkpoints.glob(f"*{OLD}")]:
            shutil.rmtree(leftover)
        self._metrics = self._open_metrics()

    def _open_metrics(self) -> FileIO:
        # Unbuffered, so that a line which could not be written is not written again when the file is closed.
        return open(self.folder / METRICS, "ab", buffering=0)

    def _try_lock(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while True:
            if _take_lock(self._lock, fcntl.LOCK_EX):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._lock.close()

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the config that the run was started with."""
        write_atomic(self.folder / CONFIG, yaml.safe_dump(config, sort_keys=False))

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        text = (json.dumps(line) + "\n").encode()
        if self._metrics.write(text) != len(text):
            raise OSError(errno.ENOSPC, f"no room for another line of {METRICS}", str(self.folder))

    def cut(self, step: int) -> None:
        """Remove all metrics and maps after a step: training will write them again."""
        lines = [line for line in read_metrics(self.folder / METRICS) if line["step"] <= step]
        with replacing(self.folder / METRICS) as partial:
            with partial.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            self._metrics.close()
        self._metrics = self._open_metrics()
        for path in (self.folder / MAPS).glob("step-*.safetensors"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder for the state after a step."""
        return begin(self.folder / CHECKPOINTS / f"step-{step:08d}")

    def seal_checkpoint(self, partial: Path, note: dict[str, Any], *, keep: int) -> None:
        """Complete a checkpoint, and remove all but the last `keep`."""
        os.fsync(self._metrics.fileno())
        seal(partial, note)
        for old in _sealed_checkpoints(self.folder)[:-keep]:
            discard(old)

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is not damaged, with its note; damaged ones are logged and renamed."""
        damaged = None
        for path in reversed(_sealed_checkpoints(self.folder)):
            try:
                return path, read_seal(path)
            except ValueError as error:
                damaged = damaged or error
                log.warning("checkpoint %s is damaged: %s; falling back to the one before it", path, error)
                renamed = path.with_name(path.name + DAMAGED)
                shutil.rmtree(renamed, ignore_errors=True)
                os.rename(path, renamed)
        if damaged:
            raise ValueError(
                f"a run to resume must have an intact checkpoint, got {self.folder}, where all are damaged, the newest "
                f"because {damaged}; start again in another folder (the damaged ones are now named *{DAMAGED})"
            )
        return None

    def finish(self, fill: Callable[[Path], None], note: dict[str, Any]) -> None:
        """Write the folder of the final model, by a function that fills it."""
        partial = begin(self.folder / FINAL)
        fill(partial)
        discard(self.folder / FINAL)
        seal(partial, note)


def _sealed_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / CHECKPOINTS).glob("step-*") if is_sealed(path))
