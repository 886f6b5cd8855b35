"""Folders that are complete or absent, whatever happens while they are written.

A folder is filled under another name; every file is hashed and flushed to disk, SEAL with the hashes last; then it is
renamed, which is atomic, and the rename is flushed to disk. A folder under its own name was complete; the hashes show
whether it still is.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from lengthwise.files import file_hash

SEAL = "seal.json"
PARTIAL, DAMAGED, OLD = ".partial", ".damaged", ".old"


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
        _flush(path)
        hashes[path.relative_to(partial).as_posix()] = file_hash(path)
    (partial / SEAL).write_text(json.dumps({**note, "sha256": hashes}, indent=1) + "\n")
    _flush(partial / SEAL)
    for folder in [*(p for p in partial.rglob("*") if p.is_dir()), partial]:
        _flush(folder)
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    os.rename(partial, target)
    _flush(target.parent)
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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
