"""Writing the folder of a run: by one process at a time, and so that nothing is lost or incomplete."""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from lengthwise.files import replacing, write_atomic
from lengthwise.runs.run import CHECKPOINTS, CONFIG, FINAL, LOCK, MAPS, METRICS, read_metrics
from lengthwise.runs.sealed import DAMAGED, OLD, PARTIAL, begin, discard, is_sealed, read_seal, seal

log = logging.getLogger(__name__)
PATIENCE = 1.0
"""Seconds to wait for the lock: a reader that checks whether it is held holds it for a moment itself."""


class RunWriter:
    """The right to write to a run's folder, held until it is closed or the process ends."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / LOCK).open("a")
        if not self._try_lock():
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
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
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
        for old in self._checkpoints()[:-keep]:
            discard(old)

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is not damaged, with its note; damaged ones are logged and renamed."""
        damaged = None
        for path in reversed(self._checkpoints()):
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

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in (self.folder / CHECKPOINTS).glob("step-*") if is_sealed(path))
