"""What a server computes: a model reads a text, its views go to the page, and single cells follow on request.

The last few models and looks stay in memory; one model runs at a time, so that two viewers take turns and memory has a
limit. A look reports its progress and can be cancelled: it ends before the next module of the model.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lengthwise.errors import check_int
from lengthwise.inspect.scores import LazyScores
from lengthwise.loading import LoadedModel, TokenSample, load_model
from lengthwise.model.families import AttentionRecord
from lengthwise.serve.catalog import Catalog
from lengthwise.show.options import ShowOptions, compute_views, layer_count
from lengthwise.show.page import TILES, training_snapshots
from lengthwise.views import Quantity
from lengthwise.views.page import Snapshot, model_payload

T = TypeVar("T")
MODELS, LOOKS, SAMPLES = 2, 4, 8
LIMIT = 2048
"""How many tokens a model reads at most, by default."""

CELLS = 2**19
"""How many cells one answer has at most."""


class LookCancelledError(Exception):
    """Nobody waits for this look any more."""


class Progress:
    """How far a look is, and whether it is still wanted; read by one thread while another computes."""

    def __init__(self) -> None:
        self.layers = 0
        """How many layers there are; 0 until the model is loaded and its text is read."""
        self.done = 0
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Let the computation end soon."""
        self._cancelled.set()

    def check(self) -> None:
        """An error if nobody waits any more."""
        if self._cancelled.is_set():
            raise LookCancelledError("the look was cancelled")


class LastUsed(OrderedDict[str, T]):
    """The last few of something, by name."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def get_or_make(self, name: str, make: Callable[[], T]) -> T:
        """The one of that name, made if it is not there; the least recently used one goes."""
        value = self.pop(name) if name in self else make()
        self[name] = value
        while len(self) > self.most:
            self.popitem(last=False)
        return value


class Session:
    """Everything that needs a model."""

    def __init__(self, catalog: Catalog, *, limit: int = LIMIT) -> None:
        check_int("max_tokens", limit)
        self.catalog, self.limit = catalog, limit
        self._models: LastUsed[LoadedModel] = LastUsed(MODELS)
        self._samples: LastUsed[TokenSample] = LastUsed(SAMPLES)
        self._cells: LastUsed[LazyScores] = LastUsed(LOOKS)
        self._turn, self._cells_lock = threading.Lock(), threading.Lock()

    def look(
        self, name: str, *, layer: str, text: str | None, length: int | None, progress: Progress | None = None
    ) -> dict[str, Any]:
        """The JSON for the page of a model that reads a text, or held-out text of some length."""
        progress = progress or Progress()
        if length is not None and not 1 <= length <= self.limit:
            raise ValueError(f"length must be from 1 to {self.limit:,} tokens here, got {length:,}")
        source = self.catalog.source(name)
        options = ShowOptions(layer=layer, text=text, length=length)
        with self._own_turn(progress):
            weights = f"{source}\n{_written(source)}"
            loaded = self._models.get_or_make(weights, lambda: load_model(source))
            reads = f"{weights}\n{length}\n{text}"
            sample = self._samples.get_or_make(reads, lambda: self._short_enough(options.sample(loaded)))
            layers = options.layers("all")
            cells = LazyScores()

            def on_record(record: AttentionRecord) -> None:
                cells.add(record)
                progress.done += 1
                progress.check()

            progress.layers = layer_count(loaded, layers)
            with _before_each_module(loaded.model, progress.check):
                views = compute_views(loaded, sample, layers, tiles=TILES, on_record=on_record)
        payload = model_payload([*training_snapshots(source, next(iter(views.values())).layers), Snapshot(views)])
        key = secrets.token_urlsafe(12)
        with self._cells_lock:
            self._cells.get_or_make(key, lambda: cells)
        payload["snapshots"][-1]["look"] = key
        return payload

    def cells(self, key: str, quantity: Quantity, layer: int, head: int, rows: slice, columns: slice) -> bytes:
        """Some cells of a head as float32, row by row."""
        count = max(0, rows.stop - rows.start) * max(0, columns.stop - columns.start)
        if count > CELLS:
            raise ValueError(f"one answer must have at most {CELLS:,} cells, got {count:,}")
        with self._cells_lock:
            part = self._cells.get_or_make(key, _forgotten).part(quantity, layer, head, rows, columns)
        return part.contiguous().numpy().tobytes()

    def _short_enough(self, sample: TokenSample) -> TokenSample:
        tokens = sample.ids.shape[1]
        if tokens > self.limit:
            raise ValueError(
                f"a text must have at most {self.limit:,} tokens here, got {tokens:,}; shorten it, or start the "
                "server with a larger --max-tokens"
            )
        return sample

    @contextmanager
    def _own_turn(self, progress: Progress) -> Iterator[None]:
        """Wait for the look before this one, unless nobody waits for this one any more."""
        while not self._turn.acquire(timeout=0.1):
            progress.check()
        try:
            progress.check()
            yield
        finally:
            self._turn.release()


@contextmanager
def _before_each_module(model: nn.Module, check: Callable[[], None]) -> Iterator[None]:
    """Call something before every module of a model, so that an error there ends its forward pass."""
    hooks = [module.register_forward_pre_hook(lambda *_: check()) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _written(source: str) -> int:
    """When a run's final model, or a checkpoint, was written: a folder may be trained anew while it is served."""
    files = [Path(source) / name for name in ("final/seal.json", "config.json")]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def _forgotten() -> LazyScores:
    raise LookupError("this look is not in memory any more, since later ones took its place; look again")
