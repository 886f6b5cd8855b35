"""Progress of a run: its metrics, a bar on a terminal, a log line now and then elsewhere, events for TensorBoard."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lengthwise.bias import widest_dtype

log = logging.getLogger(__name__)


class MetricsBuffer:
    """Lines of the metrics whose numbers are still on the device: they are read together, now and then.

    A device that is asked for a number finishes all that it was given first, and has nothing to do after.
    """

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._values: list[Tensor] = []

    def add(self, line: dict[str, Any], **values: Tensor) -> None:
        """A line, and the numbers that it still lacks; they are the same in every line."""
        self._lines.append(line)
        self._values.append(torch.stack([value.to(widest_dtype(value.device)) for value in values.values()]))
        self._names = tuple(values)

    def read(self) -> list[dict[str, Any]]:
        """All lines with their numbers; none are left."""
        values = torch.stack(self._values).tolist() if self._values else []
        lines = [line | dict(zip(self._names, own, strict=True)) for line, own in zip(self._lines, values, strict=True)]
        self._lines, self._values = [], []
        return lines


class ProgressLog:
    """The loss, the tokens a second and the time left."""

    def __init__(self, *, start: int, steps: int, every: int, quiet: bool) -> None:
        self.start, self.steps, self.every, self.quiet = start, steps, every, quiet
        self.began = time.monotonic()
        self.tokens = 0
        terminal = not quiet and sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def add(self, line: dict[str, Any], tokens: int) -> None:
        """A line of the metrics, after a step of so many tokens."""
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


class TensorBoardLog:
    """Events for TensorBoard; without a folder it does nothing."""

    def __init__(self, folder: Path | None, *, start: int) -> None:
        self._events: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
            self._events = SummaryWriter(str(folder), purge_step=start + 1)

    def add(self, line: dict[str, Any]) -> None:
        """A line of the metrics."""
        if self._events is not None:
            held_out = {f"held_out/{length}": loss for length, loss in line.get("held_out", {}).items()}
            for name, value in ({k: line[k] for k in ("loss", "lr", "gradient")} | held_out).items():
                self._events.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write the events that are still in memory."""
        if self._events is not None:
            self._events.close()
