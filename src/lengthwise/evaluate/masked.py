"""Pseudo-perplexity of masked tokens against the length that an encoder reads, on the same tokens at every length.

At each of some places in the text, tokens of a short span are masked, one in seven as in training, and predicted from a
window around them. The span and its masks are the same at every length; only the context grows, to both sides. A window
begins and ends as the tokenizer begins and ends a text, and special tokens are not predicted. A
pseudo-perplexity is exp of the mean loss: it compares lengths and models, and is not a perplexity of the text.
"""

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lengthwise.encodings import PositionError
from lengthwise.errors import check_int
from lengthwise.evaluate.corpus import Corpus, check_enough_text
from lengthwise.evaluate.losses import checked_lengths
from lengthwise.evaluate.memory import bytes_needed, fitting_batch, memory_budget
from lengthwise.evaluate.score import Score
from lengthwise.model import LengthwiseForMaskedLM
from lengthwise.model.families import check_length
from lengthwise.model.losses import IGNORED

EVERY = 7
"""One token in so many of a span is masked."""


def score_masked_lengths(
    model: PreTrainedModel,
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    mask: int,
    name: str,
    tokenizer: str = "",
    windows: int = 256,
    around: tuple[list[int], list[int]] = ([], []),
    special: Sequence[int] = (),
) -> list[Score]:
    """One score per length; for a length that the model or the machine cannot take the score has the reason.

    `around` are the tokens that the tokenizer puts before and after a text, which stand at the ends of every window in
    the place of its own; `special` are tokens that are not predicted.
    """
    lengths = checked_lengths(lengths)
    check_int("windows", windows)
    check_enough_text(len(corpus), lengths[-1])
    model.eval()
    centres, span = masked_places(len(corpus), lengths, windows)
    targets = (centres[:, None] + np.arange(-(span // 2), span - span // 2, EVERY)[None]).astype(np.int64)
    predicted = ~np.isin(corpus.tokens[targets], special)
    if not predicted.any():
        raise ValueError("the text must have tokens to predict, got special tokens alone")
    count = int(predicted.sum())
    protocol = f"fair, masked: the same {count:,} tokens at every length, in the middle of their context"
    scores = []
    for length in lengths:
        began = time.perf_counter()
        try:
            check_length(model, length)
            _check_memory(model, length)
            losses = _masked_losses(model, corpus, centres, targets, predicted, length, mask, around)
        except (PositionError, MemoryError) as error:
            scores.append(Score(name, length, protocol, corpus.source, tokenizer, refused=str(error)))
            continue
        places = targets[predicted]
        documents, which = np.unique(corpus.document[places], return_inverse=True)
        scores.append(
            Score(
                name=name,
                length=length,
                protocol=protocol,
                source=corpus.source,
                tokenizer=tokenizer,
                targets=hashlib.sha256(corpus.tokens[places].tobytes() + places.tobytes()).hexdigest()[:16],
                documents=documents.tolist(),
                nats=np.bincount(which, weights=losses[predicted]).tolist(),
                tokens=np.bincount(which).tolist(),
                bytes=np.bincount(which, weights=corpus.size[places]).astype(int).tolist(),
                seconds=time.perf_counter() - began,
            )
        )
    return scores


def masked_places(total: int, lengths: Sequence[int], windows: int) -> tuple[NDArray[np.int64], int]:
    """The middles of the windows, so that the longest fits around each, and how long the span in them is."""
    half = lengths[-1] // 2
    count = max(1, min(windows, (total - lengths[-1]) // max(1, lengths[0] // 2) + 1))
    centres = np.linspace(half, total - (lengths[-1] - half), count).astype(np.int64)
    return centres, max(1, lengths[0] // 2)


@torch.no_grad()
def _masked_losses(
    model: PreTrainedModel,
    corpus: Corpus,
    centres: NDArray[np.int64],
    targets: NDArray[np.int64],
    predicted: NDArray[np.bool_],
    length: int,
    mask: int,
    around: tuple[list[int], list[int]],
) -> NDArray[np.float64]:
    """The loss of every target, (window, target); what is not predicted is not masked."""
    at_once, losses = fitting_batch(model, length=length, scored=length), []
    for first in range(0, len(centres), at_once):
        begins = centres[first : first + at_once] - length // 2
        text = torch.from_numpy(np.stack([corpus.tokens[b : b + length] for b in begins]))
        inside = torch.from_numpy(targets[first : first + at_once] - begins[:, None])
        masked = torch.from_numpy(predicted[first : first + at_once])
        labels = text.gather(1, inside)
        read = _surrounded(text, around).scatter(1, inside, labels.masked_fill(masked, mask))
        losses.append(masked_token_losses(model, read, inside, labels).cpu().double().numpy())
    return np.concatenate(losses)


def _surrounded(ids: Tensor, around: tuple[list[int], list[int]]) -> Tensor:
    """Windows with these tokens at their ends; too short for them, as they are."""
    before, after = (torch.tensor(tokens, dtype=ids.dtype) for tokens in around)
    length = ids.shape[1]
    if len(before) + len(after) > length:
        return ids
    ids = ids.clone()
    ids[:, : len(before)] = before
    ids[:, length - len(after) :] = after
    return ids


def masked_token_losses(model: PreTrainedModel, read: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """-log p of the labels at some places of what is read, (batch, place); float32."""
    read, places, labels = (x.to(model.device) for x in (read, places, labels))
    if isinstance(model, LengthwiseForMaskedLM):
        every = torch.full_like(read, IGNORED).scatter(1, places, labels)
        return model.loss(read, every, reduction="none").gather(1, places)
    logits = model(read).logits
    chosen = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).float()
    return F.cross_entropy(chosen.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def _check_memory(model: PreTrainedModel, length: int) -> None:
    """An error where a window does not fit in half of the memory: an encoder reads it whole."""
    need, budget = bytes_needed(model, length=length, scored=length), memory_budget(model)
    if need > budget:
        raise MemoryError(
            f"an encoder reads {length:,} tokens at once, which must fit in half of the memory, {budget:,} bytes, but "
            f"needs {need:,}; leave out that length"
        )
