"""Files: where the cache is, how one is written whole or not at all, its hash, whether another machine's is here, and
whether a name can only be that of one that is missing.

Folders that are whole or not there are in runs.py.
"""

import difflib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
DISK_SECONDS = 10.0
"""How long a network disk may take to show what another machine wrote."""


def cache_folder() -> Path:
    """$LENGTHWISE_DATA, or the user's cache: tokenizers, token files and compiled kernels, which can be made again."""
    if chosen := os.environ.get("LENGTHWISE_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` at the end, and is removed after an error.

    Every process has its own, so that two that write the same file do not meet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomic(path: str | Path, content: str | bytes) -> Path:
    """Write a file so that a reader sees all of it or what was there before."""
    path = Path(path)
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(partial)
    return path


def flush(path: Path) -> None:
    """Bring a file or folder to the disk itself: what is only on its way there is lost with the power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_stored(path: Path) -> dict[str, Any]:
    """The JSON in a file that can be made again; nothing where there is none, or with a warning where it is damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        log.warning("%s is damaged, and is made again: %s", path, error)
        return {}
    return content


def json_text(content: Any) -> str:
    """JSON that every reader takes: a number that is not finite, which JSON does not have, is null."""
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def file_hash(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def appears(path: Path) -> bool:
    """Whether a file is there, or will be soon: a network disk shows what another machine wrote after a while."""
    until = time.monotonic() + DISK_SECONDS
    while True:
        # A listing, since a network disk remembers for a while that a name was not there.
        if path.parent.is_dir() and path.name in os.listdir(path.parent):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def check_folder_to_write(path: str | Path, name: str = "--out") -> None:
    """An error for a folder to write to that is a file, or that is in one."""
    path = Path(path)
    first = next((place for place in (path, *path.parents) if place.exists()), None)
    if first is not None and not first.is_dir():
        inside = "" if first == path else f"{str(path)!r} in "
        raise NotADirectoryError(f"{name} must be a folder, got {inside}the file {str(first)!r}")


def missing_path(name: str | Path) -> str | None:
    """What is wrong with a name that can only be that of a folder, which is not there; None for any other.

    >>> missing_path("runs/no-such-run")
    'there is no such folder here'
    >>> missing_path("owner/name-on-the-hub")
    """
    text, path = str(name), Path(name)
    if "/" not in text or path.exists():
        return None
    if not (text.startswith(("/", "./", "../", "~", "runs/")) or text.count("/") > 1):
        return None
    others = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, others, n=1)
    hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
    return f"there is no such folder here{hint}"
