"""How far a whole study is: one bar with the time left, or a line for each part where there is no terminal."""

import logging
import sys
import time

from tqdm import tqdm

from lengthwise.evaluate.measuring import Measure
from lengthwise.study.parts import Part

log = logging.getLogger(__name__)


class Progress:
    """Everything counts in steps of training.

    What is measured counts as the forward passes it needs, a third of a step for as many tokens.
    """

    def __init__(self, chosen: list[Part], what: Measure) -> None:
        self.steps = {part.name: part.settings.steps for part in chosen}
        tokens = what.windows * sum(what.lengths)
        self.cost = max(1, tokens // (3 * chosen[0].settings.batch_tokens))
        self.done = {part.name: part.steps_done for part in chosen}
        self.total = sum(self.steps.values()) + self.cost * len(chosen)
        self.first = sum(self.done.values())
        self.began = time.monotonic()
        self.bar = tqdm(
            total=self.total, initial=self.first, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def begin(self, words: str) -> None:
        """Say what is being done now."""
        self.bar.set_description(words)
        if self.bar.disable:
            now = sum(self.done.values())
            pace = (now - self.first) / (time.monotonic() - self.began + 1e-9)
            left = f", about {(self.total - now) / pace / 60:.0f} min left" if pace > 1e-3 else ""
            log.info("%s (%d %% done%s)", words, 100 * now // max(1, self.total), left)

    def training(self, part: Part, steps: int) -> None:
        """A run has done so many steps."""
        self.done[part.name] = steps
        self._show()

    def trained(self, part: Part) -> None:
        """A run is done with, whatever came of it."""
        self.training(part, self.steps[part.name])

    def measured(self, part: Part) -> None:
        """A measurement is done with."""
        self.training(part, self.steps[part.name] + self.cost)

    def _show(self) -> None:
        more = sum(self.done.values()) - self.bar.n
        if not self.bar.disable and more > 0:
            self.bar.update(more)
