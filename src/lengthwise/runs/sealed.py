"""Folders that are there whole or not at all, whatever happens while they are written.

A folder is filled under another name; every file is hashed and brought to disk, SEAL with the hashes last; then it is
renamed, which is atomic, and the rename is brought to disk. A folder under its own name is whole; that it still is,
the hashes tell.
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
    """An empty folder in which to write what will be `target`."""
    partial = target.with_name(target.name + PARTIAL)
    discard(partial)
    partial.mkdir(parents=True)
    return partial


def seal(partial: Path, note: dict[str, Any]) -> Path:
    """Bring a filled folder to disk under its own name, with a note in its seal."""
    hashes = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        _to_disk(path)
        hashes[path.relative_to(partial).as_posix()] = file_hash(path)
    (partial / SEAL).write_text(json.dumps({**note, "sha256": hashes}, indent=1) + "\n")
    _to_disk(partial / SEAL)
    for folder in [*(p for p in partial.rglob("*") if p.is_dir()), partial]:
        _to_disk(folder)
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    os.rename(partial, target)
    _to_disk(target.parent)
    return target


def is_sealed(folder: Path) -> bool:
    """Whether a folder was written to its end."""
    return not folder.name.endswith((PARTIAL, DAMAGED, OLD)) and (folder / SEAL).is_file()


def read_seal(folder: Path) -> dict[str, Any]:
    """The note and the hashes of a folder; a ValueError that says what is wrong if it is not whole any more."""
    try:
        found: dict[str, Any] = json.loads((folder / SEAL).read_text())
        hashes = found["sha256"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"its seal cannot be read ({type(error).__name__}: {error})") from None
    for name, wanted in hashes:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"its seal names {name!r}, which is outside of it")
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if file_hash(path) != wanted:
            raise ValueError(f"the checksum of {name} is not the one in its seal")
    return found


def discard(folder: Path) -> None:
    """Remove a folder, so that a kill on the way leaves nothing under its own name."""
    if folder.exists():
        old = folder.with_name(folder.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
        shutil.rmtree(old)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
