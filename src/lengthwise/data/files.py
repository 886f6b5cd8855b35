"""Local text: .txt, .jsonl and .parquet files and folders of them, read in pieces and never whole.

A .txt file is one document, and so is a line of .jsonl or a row of .parquet (field "text"). A text longer than a
mebibyte is cut at the last line end before it, so that a corpus in one file, or on one line, needs no more memory.
A folder is split into train and held-out by files, a single .jsonl or .parquet by rows; of a single .txt the last
twentieth is held out.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FILE_KINDS = (".txt", ".jsonl", ".parquet")
HELD_OUT = 20
"""One part in 20 is held out."""
PIECE = 2**20
"""Bytes read at a time, and characters of the longest document."""


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
        """Names, sizes and times of change."""
        stats = [(name, path.stat()) for name, path in self.names.items()]
        names = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
        return hashlib.sha256("\n".join([str(self.path.resolve()), *names]).encode()).hexdigest()


def held_out(names: Iterable[str]) -> frozenset[str]:
    """A twentieth of the names, at least one, by their hashes: the same on every machine."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return frozenset(ranked[: max(1, round(len(ranked) / HELD_OUT))])


def held_out_row(row: int) -> bool:
    """Whether a row of a file or data set is held out: one in twenty, spread by a hash."""
    return int.from_bytes(hashlib.sha256(str(row).encode()).digest()[:4], "big") % HELD_OUT == 0


def _part_of_one(path: Path, split: str) -> Iterator[str]:
    if path.suffix == ".txt":
        border = path.stat().st_size * (HELD_OUT - 1) // HELD_OUT
        yield from read_text(path, after=border) if split == "held-out" else read_text(path, before=border)
    else:
        for row, text in enumerate(read_documents(path)):
            if held_out_row(row) == (split == "held-out"):
                yield text


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
        raise ImportError('parquet files need pyarrow; install it with pip install "lengthwise[data]"') from None
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
