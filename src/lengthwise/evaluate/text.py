"""Held-out text as one row of tokens that knows of each token its document and its bytes.

    row = end, document 0, end, document 1, end, ...

Documents are what confidence is drawn from: tokens of one document are alike, so they are resampled together. Bytes
are what makes models with different tokenizers comparable: a token's bytes are those that its characters add, and an
end of text has none.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens in a row, the number of each one's document, and the bytes each one stands for."""

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


def read_text(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, source: str = "text", limit: int | None = None
) -> Text:
    """Documents as a row of tokens, ends between them, stopping once there are `limit` tokens."""
    if not tokenizer.is_fast:
        raise TypeError(
            f"bytes are counted with the offsets of a fast tokenizer; {type(tokenizer).__name__} has none. "
            "Load the tokenizer with use_fast=True."
        )
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    border = [] if end is None else [int(end)]
    tokens = [np.array(border, dtype=np.int64)]
    owner = [np.zeros(len(border), dtype=np.int64)]
    size = [np.zeros(len(border), dtype=np.int64)]
    total = len(border)
    for number, document in enumerate(documents):
        found = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(found["input_ids"], dtype=np.int64)
        if not len(ids):
            continue
        tokens.append(np.concatenate([ids, np.array(border, dtype=np.int64)]))
        size.append(np.pad(_bytes(document, np.array(found["offset_mapping"])[:, 1]), (0, len(border))))
        owner.append(np.full(len(tokens[-1]), number))
        total += len(tokens[-1])
        if limit is not None and total >= limit:
            break
    row = np.concatenate(tokens)[:limit]
    if len(row) < 2:
        raise ValueError(f"there must be two tokens of text at least; {source} has {len(row)}. Give more text.")
    return Text(source, row, np.concatenate(owner)[:limit], np.concatenate(size)[:limit])


def _bytes(document: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many bytes each token adds to what was covered before it; the last covers the document to its end."""
    points = np.frombuffer(document.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    covered = np.concatenate([[0], widths.cumsum()])[np.maximum.accumulate(ends)]
    covered[-1] = widths.sum()
    return np.diff(covered, prepend=0)
