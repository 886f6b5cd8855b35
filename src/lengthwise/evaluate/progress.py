"""How far a measurement is and how long it will take: one bar over everything that will be computed.

Work is counted in tokens read, each weighted by what attention adds to it at that length.
"""

import os
import sys
from typing import Self

from tqdm import tqdm

EVEN = 8192
"""At about this length attention takes as long as everything else in a small model."""


def work(length: int, count: int = 1) -> float:
    """What reading `count` windows of a length takes, in tokens of a short one."""
    return count * length * (1 + length / EVEN)


class Progress:
    """A bar on a terminal with the time left; nothing elsewhere, and of several processes the first alone has it."""

    def __init__(self, total: float) -> None:
        form = "{desc} {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
        is_shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        self.bar = tqdm(total=total, bar_format=form, leave=False, disable=not is_shown)

    def start(self, text: str) -> None:
        """Say what is computed now."""
        self.bar.set_description_str(text)

    def done(self, length: int, count: int = 1) -> None:
        """So many windows of a length are read."""
        self.bar.update(work(length, count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
