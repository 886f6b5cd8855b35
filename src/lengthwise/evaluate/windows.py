"""Protocols: which windows of the text are read at a length, and which of their tokens are scored.

    paper     consecutive windows from the start, every token scored; other lengths score other text
    fair      the last few tokens of windows that end at the same places at every length: only the context grows
    sliding   every token scored once, with all but `stride` tokens of context; at stride = length this is the rolling
              likelihood of lm-evaluation-harness

A window of `length` tokens makes `length` predictions, the last of them of the token behind it.
"""

from typing import NamedTuple

import numpy as np

from lengthwise.errors import check_choice, check_int
from lengthwise.evaluate.config import PROTOCOLS, Protocol


class Window(NamedTuple):
    """Reads tokens[begin : begin + length] and is scored on its last `scored` predictions."""

    begin: int
    length: int
    scored: int

    @property
    def targets(self) -> slice:
        """Where the tokens that are scored stand in the text."""
        stop = self.begin + self.length + 1
        return slice(stop - self.scored, stop)


class WindowPlan(NamedTuple):
    """The windows of one length, and the protocol as a sentence."""

    windows: list[Window]
    description: str


def plan_windows(
    protocol: Protocol,
    total: int,
    length: int,
    *,
    shortest: int,
    longest: int,
    windows: int,
    stride: int | None = None,
) -> WindowPlan:
    """The windows at one of several lengths in a text of `total` tokens, at most `windows` of them.

    `stride` is how many tokens of a window are scored under fair (a quarter of the shortest length if not given) and
    sliding (half of the length).
    """
    check_choice("protocol", protocol, PROTOCOLS)
    check_int("windows", windows)
    for name, value in (("length", length), ("stride", 1 if stride is None else stride)):
        check_int(name, value)
    if total < longest + 1:
        raise ValueError(
            f"the text must have one token more than the longest length, {longest + 1:,}, got {total:,}; give more "
            "text, or leave out that length"
        )
    if protocol == "paper":
        return _paper(total, length, windows)
    if protocol == "sliding":
        return _sliding(total, length, windows, stride or max(1, length // 2))
    return _fair(total, length, longest, windows, min(stride or max(1, shortest // 4), shortest))


def _paper(total: int, length: int, windows: int) -> WindowPlan:
    count = min(windows, (total - 1) // length)
    chosen = [Window(i * length, length, length) for i in range(count)]
    return WindowPlan(chosen, f"paper: consecutive windows from the start of the text, at most {windows:,}")


def _fair(total: int, length: int, longest: int, windows: int, stride: int) -> WindowPlan:
    count = min(windows, (total - 1 - longest) // stride + 1)
    ends = np.linspace(longest, total - 1, count).astype(int).tolist()
    chosen = [Window(end - length, length, stride) for end in ends]
    return WindowPlan(
        chosen, f"fair: the same {count * stride:,} tokens at every length, the last {stride} of each window"
    )


def _sliding(total: int, length: int, windows: int, stride: int) -> WindowPlan:
    stride = min(stride, length)
    chosen = [Window(0, length, length)]
    while chosen[-1].targets.stop < total and len(chosen) < windows:
        stop = min(chosen[-1].targets.stop + stride, total)
        chosen.append(Window(stop - 1 - length, length, stop - chosen[-1].targets.stop))
    return WindowPlan(chosen, f"sliding: every token once, windows moved by {stride}, at most {windows:,}")
