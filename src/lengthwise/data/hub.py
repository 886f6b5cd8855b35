"""Data sets of the Hugging Face hub, streamed: only their tokens are stored."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lengthwise.data.files import held_out_row


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
FIRST = 100_000
"""Rows of which one in twenty is held out: a stream of billions of words need not be read to its end."""
HEADING = re.compile(r" = [^=].*[^=] = \n")


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
            if split == "held-out" and row == FIRST:
                return
            if split == "all" or (row < FIRST and held_out_row(row)) == (split == "held-out"):
                yield text

    def fingerprint(self) -> str:
        """The name alone: whether the hub has changed it is not checked."""
        return repr(self.data)

    def _rows(self, part: str) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise ImportError(
                'data sets of the hub need the package datasets; install it with pip install "lengthwise[data]"'
            ) from None
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
