"""What a run says while it trains: a bar on a terminal, a line now and then elsewhere; and signals, which it obeys."""

import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm import tqdm

log = logging.getLogger(__name__)


class Progress:
    """The loss, the tokens a second and the time left."""

    def __init__(self, *, start: int, steps: int, every: int, quiet: bool) -> None:
        self.start, self.steps, self.every, self.quiet = start, steps, every, quiet
        self.began = time.monotonic()
        self.tokens = 0
        terminal = not quiet and sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def tell(self, line: dict[str, Any], tokens: int) -> None:
        """After a step that read so many tokens."""
        self.tokens += tokens
        seconds = max(time.monotonic() - self.began, 1e-9)
        held_out = "".join(f", held-out at {k} {v:.3f}" for k, v in line.get("held_out", {}).items())
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {line['loss']:.3f}{held_out}, {self.tokens / seconds:,.0f} tokens/s", False)
            self.bar.update()
        elif not self.quiet and (line["step"] % self.every == 0 or line["step"] == self.steps or held_out):
            left = seconds / (line["step"] - self.start) * (self.steps - line["step"])
            text = "step %d of %d, loss %.3f%s, %s tokens/s, %s left"
            values = f"{self.tokens / seconds:,.0f}", tqdm.format_interval(left)
            log.info(text, line["step"], self.steps, line["loss"], held_out, *values)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()


class Board:
    """Events for TensorBoard in the run's folder, if they are wanted."""

    def __init__(self, folder: Path | None, *, start: int) -> None:
        self._events: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError("--tensorboard needs the package tensorboard. Use: pip install tensorboard") from None
            self._events = SummaryWriter(str(folder), purge_step=start + 1)

    def add(self, line: dict[str, Any]) -> None:
        """A line of the metrics."""
        if self._events is not None:
            held_out = {f"held_out/{length}": loss for length, loss in line.get("held_out", {}).items()}
            for name, value in ({k: line[k] for k in ("loss", "lr", "gradient")} | held_out).items():
                self._events.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._events is not None:
            self._events.close()


class Signals:
    """SIGINT and SIGTERM end a run after the step at hand, with a checkpoint; a second one ends it at once."""

    def __init__(self, *, patient: bool) -> None:
        self.patient = patient
        self.came: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, where signals do not come
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number)
        # Under torchrun signals come from the terminal and from torchrun, which itself ends who takes too long.
        if self.patient:
            return
        log.warning("%s: a checkpoint is written after this step; once more ends at once", self.came.name)
        for each, handler in self._before.items():
            signal.signal(each, handler)
