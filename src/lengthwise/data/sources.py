"""Where documents come from: the one place where the name of a source is resolved.

    stdlib                          the text that every Python has: its library's sources and its manual's topics
    notes.txt, a.jsonl, b.parquet   files, or folders of them
    wikitext-103, fineweb-edu       data sets of the hub that the CABLE paper trains on
    owner/name, owner/name:config   any other data set of the hub, streamed: only its tokens are stored
    task:copy, task:copy:512        examples of a synthetic task, up to 128 characters or the given number
    task:all, task:all:512          those of every task in turn

A source is split by whole files or rows, and always in the same way: "held-out" is about a twentieth (of a stream, of
its first 100,000 rows), "train" the rest, "all" both. To choose options without looking at what is reported, "train"
itself is split by documents: "validation" is about a twentieth of it, "fitting" the rest.

A .txt file is one document, and so is a line of .jsonl or a row of .parquet (field "text"). A text longer than a
mebibyte is cut at the last line end before it, so that a corpus in one file, or on one line, needs no more memory.
A folder is split into train and held-out by files, a single .jsonl or .parquet by rows; of a single .txt the last
twentieth is held out.
"""

import codecs
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, Protocol

from lengthwise.errors import check_choice, how_to_install
from lengthwise.tasks import ALL_TASKS, TASKS, TaskSource

Split = Literal["train", "held-out", "all", "fitting", "validation"]
SPLITS: tuple[Split, ...] = ("train", "held-out", "all", "fitting", "validation")

NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config"}
"""Folders of the standard library without text worth reading: installed packages, and tests."""

TOPICS = "pydoc_data/topics.py"
FILE_KINDS = (".txt", ".jsonl", ".parquet")
HELD_OUT = 20
"""One part in 20 is held out."""
PIECE = 2**20
"""Bytes read at a time, and characters of the longest document."""
FIRST_BYTES = 4096
"""Of each file, that its fingerprint has: archives may give all files of one size the same time."""
STREAM_ROWS = 100_000
"""Rows of which one in twenty is held out: a stream of billions of words need not be read to its end."""
HEADING = re.compile(r" = [^=].*[^=] = \n")


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
        texts = split_rows(documents(source, "train"), held_out=split == "validation")
        return (text for text in texts if text)
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
    if name in HUB_PRESETS or (is_hub_name(name) and not name.endswith(FILE_KINDS)):
        return HubSource(name)
    raise ValueError(
        f"data must be 'stdlib', a file ({', '.join(FILE_KINDS)}), a folder, {', '.join(map(repr, HUB_PRESETS))}, "
        f"'owner/name' of a data set on the hub, or 'task:' and one of {', '.join((*TASKS, ALL_TASKS))}, "
        f"got {name!r}, which is none of them here"
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


class FileSource:
    """A file or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        self.names = {file.relative_to(path).as_posix(): file for file in files if file.suffix in FILE_KINDS}
        if not self.names:
            got = "which is another kind of file" if path.is_file() else "a folder without any"
            raise ValueError(f"data must be {', '.join(FILE_KINDS)} or a folder with such files, got {path}, {got}")
        self.held_out = held_out(self.names) if len(self.names) > 1 else None

    def documents(self, split: str) -> Iterator[str]:
        """The texts of one split, by files if there are several."""
        for name, path in self.names.items():
            if self.held_out is None and split != "all":
                yield from _part_of_one(path, split)
            elif self.held_out is None or split == "all" or (name in self.held_out) == (split == "held-out"):
                yield from read_documents(path)

    def fingerprint(self) -> str:
        """Names, sizes, times of change and first bytes, wherever they are: a copy that keeps its times is the same."""
        digest = hashlib.sha256(self.path.resolve().name.encode())
        for name, path in self.names.items():
            stat = path.stat()
            digest.update(f"\n{name} {stat.st_size} {stat.st_mtime_ns} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(FIRST_BYTES))
        return digest.hexdigest()


def held_out(names: Iterable[str]) -> frozenset[str]:
    """A twentieth of the names, at least one, by their hashes: the same on every machine."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return frozenset(ranked[: max(1, round(len(ranked) / HELD_OUT))])


def held_out_row(row: int) -> bool:
    """Whether a row of a file or data set is held out: one in twenty, spread by a hash."""
    return int.from_bytes(hashlib.sha256(str(row).encode()).digest()[:4], "big") % HELD_OUT == 0


FIRST_HELD_OUT = next(filter(held_out_row, count()))


def split_rows(texts: Iterable[str], *, held_out: bool) -> Iterator[str]:
    """The rows that are held out, or the others; where these are too few for one in twenty, the last is held out.

    Of one row alone it is the last twentieth.
    """
    rows = iter(texts)
    first = list(islice(rows, FIRST_HELD_OUT + 1))
    if len(first) > FIRST_HELD_OUT:
        yield from (text for row, text in enumerate(chain(first, rows)) if held_out_row(row) == held_out)
    elif len(first) > 1:
        yield from first[-1:] if held_out else first[:-1]
    else:
        for text in first:
            border = len(text) * (HELD_OUT - 1) // HELD_OUT
            yield text[border:] if held_out else text[:border]


def _part_of_one(path: Path, split: str) -> Iterator[str]:
    if path.suffix == ".txt":
        border = path.stat().st_size * (HELD_OUT - 1) // HELD_OUT
        yield from read_text(path, after=border) if split == "held-out" else read_text(path, before=border)
    else:
        yield from split_rows(read_documents(path), held_out=split == "held-out")


def read_documents(path: Path) -> Iterator[str]:
    """Every document of one file."""
    if path.suffix == ".txt":
        yield from read_text(path)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    else:
        yield from _read_parquet(path)


def read_text(path: Path, *, after: int = 0, before: int | None = None) -> Iterator[str]:
    """A text file as documents of at most a mebibyte, cut at line ends, from byte `after` to byte `before`.

    Both borders move on to the next line end, so that what one call leaves the other takes.
    """
    rest = ""
    for piece in _decoded(path, _line_end(path, after), None if before is None else _line_end(path, before)):
        rest += piece
        while len(rest) > PIECE:
            cut = rest.rfind("\n", 0, PIECE) + 1 or PIECE
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _line_end(path: Path, offset: int) -> int:
    """The first byte after the line that holds byte `offset`; the first of the file for 0."""
    if not offset:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        while piece := file.read(PIECE):
            if (end := piece.find(b"\n")) >= 0:
                return file.tell() - len(piece) + end + 1
        # One line without an end: cut at the start of the next character.
        file.seek(offset)
        return offset + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def _decoded(path: Path, first: int, stop: int | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        file.seek(first)
        while True:
            offset = file.tell() - len(decoder.getstate()[0])
            piece = file.read(PIECE if stop is None else min(PIECE, stop - file.tell()))
            try:
                yield decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise bad_text(path, offset + error.start, error) from None
            if not piece:
                return


def bad_text(path: Path, offset: int, error: UnicodeDecodeError) -> ValueError:
    """The error for bytes that are not UTF-8, such as those of Latin-1 or UTF-16."""
    return ValueError(
        f"text must be UTF-8, got byte {error.object[error.start]:#04x} at offset {offset} of {path} ({error.reason}); "
        "convert the file, e.g. with iconv -f LATIN1 -t UTF-8"
    )


def _read_jsonl(path: Path) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except UnicodeDecodeError as error:
                    raise bad_text(path, offset + error.start, error) from None
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path} must have one JSON object a line, got line {number}: {error}") from None
                yield _text_of(row, f"{path}, line {number}")
            offset += len(line)


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"parquet files need the package pyarrow; {how_to_install('data')}") from None
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        for row in batch.to_pylist():
            yield _text_of(row, f"{path}, row {number}")
            number += 1


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = f"the fields {', '.join(map(str, row))}" if isinstance(row, dict) and row else "no fields"
        raise ValueError(f'a document must have a text in the field "text", got {names} in {where}')
    return text


@dataclass(frozen=True)
class HubData:
    """One data set; without a held-out split of its own, some of the first rows of the train split are held out."""

    name: str
    config: str | None = None
    held_out: str | None = None
    articles: bool = False
    """Whether a row is a line, and a document begins at a heading, as in WikiText."""


HUB_PRESETS = {
    "wikitext-103": HubData("Salesforce/wikitext", "wikitext-103-raw-v1", held_out="validation", articles=True),
    "fineweb-edu": HubData("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
GPT2_TOKENS = {"wikitext-103": 118_000_000, "fineweb-edu": 10_000_000_000}
"""About how many tokens of GPT-2's they have; of other sources it is not known before they are tokenized."""


def is_hub_name(name: str) -> bool:
    """Whether it has the form owner/name or owner/name:config."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) is not None and not name.startswith(".")


class HubSource:
    """A data set by name."""

    def __init__(self, name: str) -> None:
        owner, _, config = name.partition(":")
        self.data = HUB_PRESETS.get(name) or HubData(owner, config or None)

    def documents(self, split: str) -> Iterator[str]:
        """The texts of one split."""
        if self.data.held_out is not None:
            chosen = {"train": ["train"], "held-out": [self.data.held_out]}.get(split, ["train", self.data.held_out])
            for part in chosen:
                rows = self._rows(part)
                yield from joined_articles(rows) if self.data.articles else rows
            return
        for row, text in enumerate(self._rows("train")):
            if split == "held-out" and row == STREAM_ROWS:
                return
            if split == "all" or (row < STREAM_ROWS and held_out_row(row)) == (split == "held-out"):
                yield text

    def fingerprint(self) -> str:
        """The name alone: whether the hub has changed it is not checked."""
        return repr(self.data)

    def _rows(self, part: str) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ImportError(f"data sets of the hub need the package datasets; {how_to_install('data')}") from None
        try:
            rows: Iterable[dict[str, Any]] = load_dataset(self.data.name, self.data.config, split=part, streaming=True)
            for row in rows:
                yield row["text"]
        except (OSError, ValueError, KeyError) as error:
            raise OSError(
                f"expected a data set of the hub with split {part!r} and field 'text', got {self.data.name!r}, which "
                f"cannot be read: {error}; check the name and the network, or use 'stdlib' or files of your own"
            ) from error


def joined_articles(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's lines as articles: a heading of the first level begins one."""
    article: list[str] = []
    for line in lines:
        if HEADING.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
