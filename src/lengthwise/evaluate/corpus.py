"""Held-out text as one row of tokens with the document and the number of bytes of each token.

    row = end, document 0, end, document 1, end, ...

Confidence intervals resample documents: tokens of one document are alike, so they are drawn together. Bytes make models
with different tokenizers comparable: a token's bytes are those that its characters add, and an end of text has none.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lengthwise.data.tokenizers import encode_with_offsets


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens in a row, the number of each one's document, and the bytes of each one."""

    source: str
    tokens: NDArray[np.int64]
    document: NDArray[np.int64]
    size: NDArray[np.int64]

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
    return Corpus(source, row, np.concatenate(owner)[:limit], np.concatenate(size)[:limit])


def _bytes(document: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes each token adds to those before it; the last covers the document to its end."""
    points = np.frombuffer(document.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    covered = np.concatenate([[0], widths.cumsum()])[np.maximum.accumulate(ends)]
    covered[-1] = widths.sum()
    return np.diff(covered, prepend=0)
