"""SIGINT and SIGTERM end a run after the current step, with a checkpoint; a second one ends it at once."""

import logging
import signal
from types import FrameType, TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818
    """A signal ended a run early, after a checkpoint."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.number = number


class SignalHandler:
    """Notes the signals of a run while it is entered.

    ignore_repeats  several processes: torchrun passes signals on, and ends by itself a process that takes too long
    """

    def __init__(self, *, ignore_repeats: bool) -> None:
        self.ignore_repeats = ignore_repeats
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, which is the only one that receives signals
            self._previous = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if not self.ignore_repeats:
            log.warning("%s: stopping after this step, with a checkpoint; once more stops at once", self.received.name)
            self._restore()
