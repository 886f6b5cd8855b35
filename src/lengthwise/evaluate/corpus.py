"""Held-out text as one row of tokens, with the document and the number of bytes of each; and the windows read of it.

    row = end, document 0, end, document 1, end, ...

Confidence intervals resample documents: tokens of one document are alike, so they are drawn together. Bytes make models
with different tokenizers comparable: a token's bytes are those that its characters add, and an end of text has none.

A protocol says which windows of the text are read at a length, and which of their tokens are scored:

    paper     consecutive windows from the start, every token scored; other lengths score other text
    fair      the same tokens at every length, the last ones of each window: only the context grows
    sliding   every token scored once, with all but `stride` tokens of context; at stride = length this is the rolling
              likelihood of lm-evaluation-harness

A window of `length` tokens makes `length` predictions, the last of them of the token behind it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lengthwise.data.tokenizers import encode_with_offsets, start_token
from lengthwise.errors import check_choice, check_int
from lengthwise.evaluate.config import PROTOCOLS, Protocol


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens in a row, the number of each one's document, and the bytes of each one."""

    source: str
    tokens: NDArray[np.int64]
    document: NDArray[np.int64]
    size: NDArray[np.int64]
    start: int | None = None
    """The token with which the tokenizer begins every text, if it does."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str:
        """The same for the same tokens."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()

    def middle(self, length: int) -> NDArray[np.int64]:
        """`length` tokens around the middle: the first document often begins with a licence."""
        first = max(0, len(self) // 2 - length // 2)
        return self.tokens[first : first + length].copy()


def read_corpus(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, source: str = "text", limit: int | None = None
) -> Corpus:
    """Documents as a row of tokens, ends between them, stopping once there are `limit` tokens.

    Tokens are those of training: a document that spells out a special token does not become one.
    """
    if not tokenizer.is_fast:
        raise TypeError(
            f"counting bytes needs the offsets of a fast tokenizer, got {type(tokenizer).__name__}; load it with "
            "use_fast=True"
        )
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    border = [] if end is None else [int(end)]
    tokens = [np.array(border, dtype=np.int64)]
    owner = [np.zeros(len(border), dtype=np.int64)]
    size = [np.zeros(len(border), dtype=np.int64)]
    total = len(border)
    for number, document in enumerate(documents):
        ids, offsets = encode_with_offsets(tokenizer, document)
        if not ids:
            continue
        tokens.append(np.array([*ids, *border], dtype=np.int64))
        size.append(np.pad(_bytes(document, np.array(offsets)[:, 1]), (0, len(border))))
        owner.append(np.full(len(tokens[-1]), number))
        total += len(tokens[-1])
        if limit is not None and total >= limit:
            break
    row = np.concatenate(tokens)[:limit]
    if len(row) < 2:
        raise ValueError(f"the text must have at least two tokens, got {len(row)} from {source}")
    return Corpus(source, row, np.concatenate(owner)[:limit], np.concatenate(size)[:limit], start_token(tokenizer))


def _bytes(document: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes each token adds to those before it; the last covers the document to its end."""
    points = np.frombuffer(document.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    covered = np.concatenate([[0], widths.cumsum()])[np.maximum.accumulate(ends)]
    covered[-1] = widths.sum()
    return np.diff(covered, prepend=0)


class TextWindow(NamedTuple):
    """Reads tokens[begin : begin + length] and is scored on its last `scored` predictions."""

    begin: int
    length: int
    scored: int

    @property
    def targets(self) -> slice:
        """Where the tokens that are scored stand in the text."""
        stop = self.begin + self.length + 1
        return slice(stop - self.scored, stop)


class TextWindowPlan(NamedTuple):
    """The windows of one length, and the protocol as a sentence."""

    windows: list[TextWindow]
    description: str


def check_enough_text(total: int, longest: int) -> None:
    """An error unless a text of `total` tokens has a window of the longest length, and a token after it."""
    if total < longest + 1:
        raise ValueError(
            f"the text must have one token more than the longest length, {longest + 1:,}, got {total:,}; give more "
            "text, or leave out that length"
        )


def plan_text_windows(
    protocol: Protocol,
    total: int,
    length: int,
    *,
    shortest: int,
    longest: int,
    windows: int,
    stride: int | None = None,
) -> TextWindowPlan:
    """The windows at one of several lengths in a text of `total` tokens, at most `windows` of them.

    `stride` is how many tokens are scored at a place under fair (at most, and by default, the shortest length), and in
    a window under sliding (half of the length); under fair `windows` counts the places.
    """
    check_choice("protocol", protocol, PROTOCOLS)
    check_int("windows", windows)
    for name, value in (("length", length), ("stride", 1 if stride is None else stride)):
        check_int(name, value)
    check_enough_text(total, longest)
    if protocol == "paper":
        return _paper(total, length, windows)
    if protocol == "sliding":
        return _sliding(total, length, windows, stride or max(1, length // 2))
    return _fair(total, length, longest, windows, min(stride or shortest, shortest))


def _paper(total: int, length: int, windows: int) -> TextWindowPlan:
    count = min(windows, (total - 1) // length)
    chosen = [TextWindow(i * length, length, length) for i in range(count)]
    return TextWindowPlan(chosen, f"paper: consecutive windows from the start of the text, at most {windows:,}")


def _fair(total: int, length: int, longest: int, windows: int, stride: int) -> TextWindowPlan:
    """`stride` tokens at each of `windows` places; at a short length several windows share them."""
    # A window scores at most a quarter of its length, so that every token has at least the rest as its context.
    most = max(1, longest // 4)
    stride = min(stride, total - 1 - longest + most)
    first = longest + max(0, stride - most)
    count = min(windows, (total - 1 - first) // stride + 1)
    ends = np.linspace(first, total - 1, count).astype(int).tolist()
    step = min(stride, max(1, length // 4))
    chosen = []
    for end in ends:
        for left in range(stride, 0, -step):
            scored = min(step, left)
            chosen.append(TextWindow(end - left + scored - length, length, scored))
    return TextWindowPlan(
        chosen,
        f"fair: the same {count * stride:,} tokens at every length, each after at least three quarters of it",
    )


def _sliding(total: int, length: int, windows: int, stride: int) -> TextWindowPlan:
    stride = min(stride, length)
    chosen = [TextWindow(0, length, length)]
    while chosen[-1].targets.stop < total and len(chosen) < windows:
        stop = min(chosen[-1].targets.stop + stride, total)
        chosen.append(TextWindow(stop - 1 - length, length, stop - chosen[-1].targets.stop))
    return TextWindowPlan(chosen, f"sliding: every token once, windows moved by {stride}, at most {windows:,}")
