"""Where documents come from: the one place where the name of a source is resolved.

    stdlib                          the text that every Python has: its library's sources and its manual's topics
    notes.txt, a.jsonl, b.parquet   files, or folders of them
    wikitext-103, fineweb-edu       data sets of the hub that the CABLE paper trains on
    owner/name, owner/name:config   any other data set of the hub, streamed
    task:copy, task:copy:512        examples of a synthetic task, up to 128 characters or the given number

A source is split by whole files or rows, and always in the same way: "held-out" is about a twentieth (of a stream, of
its first 100,000 rows), "train" the rest, "all" both. To choose options without looking at what is reported, "train"
itself is split by documents: "validation" is about a twentieth of it, "fitting" the rest.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, Protocol

from lengthwise.data.files import FILE_KINDS, FileSource, held_out, held_out_row, read_text
from lengthwise.data.hub import HUB_PRESETS, HubSource, is_hub_name
from lengthwise.errors import check_choice
from lengthwise.tasks import TASKS, TaskSource

Split = Literal["train", "held-out", "all", "fitting", "validation"]
SPLITS: tuple[Split, ...] = ("train", "held-out", "all", "fitting", "validation")

NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config"}
"""Folders of the standard library without text worth reading: installed packages, and tests."""

TOPICS = "pydoc_data/topics.py"


class Source(Protocol):
    """A corpus that can be read again and again in the same order."""

    def documents(self, split: Literal["train", "held-out", "all"]) -> Iterator[str]:
        """The texts of one split, in the same order every time."""
        ...

    def fingerprint(self) -> str:
        """A string that changes when the corpus does, without reading it."""
        ...


def documents(source: str | Path, split: Split = "train") -> Iterator[str]:
    """The documents of a source, one at a time.

    >>> next(documents("stdlib", "held-out")) == next(documents("stdlib", "held-out"))
    True
    """
    check_choice("split", split, SPLITS)
    if split == "fitting" or split == "validation":
        texts = documents(source, "train")
        return (text for row, text in enumerate(texts) if held_out_row(row) == (split == "validation"))
    return (text for text in resolve(source).documents(split) if text)


def resolve(source: str | Path) -> Source:
    """The source of that name."""
    name = str(source)
    if name == "stdlib":
        return StdlibSource()
    if name.startswith("task:"):
        return TaskSource(name.removeprefix("task:"))
    if Path(name).exists():
        return FileSource(Path(name))
    if name in HUB_PRESETS or is_hub_name(name):
        return HubSource(name)
    raise ValueError(
        f"data must be 'stdlib', a file ({', '.join(FILE_KINDS)}), a folder, {', '.join(map(repr, HUB_PRESETS))}, "
        f"'owner/name' of a data set on the hub, or 'task:' and one of {', '.join(TASKS)}, got {name!r}, which is none "
        "of them here"
    )


class StdlibSource:
    """Python's own library: about 12 MB in 800 files, and the manual's topics as prose. It differs by version."""

    def __init__(self) -> None:
        self.folder = Path(sysconfig.get_path("stdlib"))
        files = []
        for root, folders, names in os.walk(self.folder):
            # In place, so that thousands of installed packages are not even listed.
            folders[:] = [folder for folder in folders if folder not in NOT_TEXT]
            files += [Path(root, name) for name in names if name.endswith(".py")]
        paths = [path.relative_to(self.folder).as_posix() for path in files if path.stat().st_size]
        # As a source file the topics would be one long literal; each of them is a document of its own.
        self.names = sorted([name for name in paths if name != TOPICS] + [f"{TOPICS}/{topic}" for topic in topics])
        self.held_out = held_out(self.names)

    def documents(self, split: Split) -> Iterator[str]:
        """One document a file, one a topic."""
        for name in self.names:
            if split == "all" or (name in self.held_out) == (split == "held-out"):
                topic = name.removeprefix(f"{TOPICS}/")
                yield from read_text(self.folder / name) if topic == name else (topics[topic],)

    def fingerprint(self) -> str:
        """The version and the names: an installed library is not edited."""
        return hashlib.sha256("\n".join([sys.version, *self.names]).encode()).hexdigest()
