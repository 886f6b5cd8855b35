"""What was looked at: a model that read a text, its maps for the page, and single cells for whoever asks for them.

A few models and a few looks are kept, the last ones used; one model runs at a time, so that two viewers take turns
and memory has an end.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from lengthwise.errors import check_int
from lengthwise.inspect.lazy_scores import LazyScores
from lengthwise.inspect.model_maps import position_records
from lengthwise.inspect.paging import look, snapshots_of
from lengthwise.inspect.show import read
from lengthwise.inspect.subject import Subject, find_subject
from lengthwise.serve.library import Library
from lengthwise.views.maps import What
from lengthwise.views.page import Snapshot, model_payload

T = TypeVar("T")
MODELS, LOOKS = 2, 4
LIMIT = 2048
"""Tokens that a model reads at most, if the server is not told otherwise."""

PART = 2**19
"""How many cells one answer has at most."""


class Kept(OrderedDict[str, T]):
    """The last few of something, by name."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def take(self, name: str, make: Callable[[], T]) -> T:
        """What is kept by that name, made if it is not; the one that was not used for longest goes."""
        found = self.pop(name) if name in self else make()
        self[name] = found
        while len(self) > self.most:
            self.popitem(last=False)
        return found


class Looks:
    """Everything that needs a model."""

    def __init__(self, library: Library, *, limit: int = LIMIT) -> None:
        check_int("max_tokens", limit, "It counts tokens.")
        self.library, self.limit = library, limit
        self._models: Kept[Subject] = Kept(MODELS)
        self._cells: Kept[LazyScores] = Kept(LOOKS)
        self._turn = threading.Lock()

    def look(self, name: str, *, layer: str, text: str | None, length: int | None) -> dict[str, Any]:
        """What the page is told of a model that reads a text, or so many held-out tokens."""
        if length is not None and not 1 <= length <= self.limit:
            raise ValueError(f"a length must be from 1 to {self.limit:,} tokens here; {length:,} came. Change it.")
        with self._turn:
            source = self.library.source(name)
            subject = self._models.take(source, lambda: find_subject(source, seed=0))
            sequences = read(subject, length=length, text=text, seed=0)
            tokens = sequences.ids.shape[1]
            if tokens > self.limit:
                raise ValueError(
                    f"a text may have {self.limit:,} tokens here; this one has {tokens:,}. Shorten it, or start the "
                    "server with a larger --max_tokens."
                )
            views = look(subject, sequences, layer=layer)
            told = model_payload([*snapshots_of(source), Snapshot(views)])
            key = secrets.token_urlsafe(12)
            self._cells.take(key, lambda: LazyScores(position_records(subject.model, sequences.ids[:1])))
        told["snapshots"][-1]["look"] = key
        return told

    def cells(self, key: str, what: What, layer: int, head: int, rows: slice, columns: slice) -> bytes:
        """Some cells of a head as float32, row by row."""
        count = max(0, rows.stop - rows.start) * max(0, columns.stop - columns.start)
        if count > PART:
            raise ValueError(f"one answer has {PART:,} cells at most; {count:,} were asked for. Ask for fewer.")
        with self._turn:
            part = self._cells.take(key, _gone).part(what, layer, head, rows, columns)
        return part.contiguous().numpy().tobytes()


def _gone() -> LazyScores:
    raise LookupError("what was looked at is not kept any more, since others came after it. Look again.")
