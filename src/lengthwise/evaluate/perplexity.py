"""A model's loss against the length it reads, under a protocol: any causal language model of transformers."""

import hashlib
import sys
import time
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from lengthwise.encodings import PositionError
from lengthwise.errors import check_int
from lengthwise.evaluate.losses import fitting_chunk, token_losses
from lengthwise.evaluate.score import Score
from lengthwise.evaluate.text import Text
from lengthwise.evaluate.windows import Plan, Protocol, Window, plan
from lengthwise.model.families import check_length

BATCH = 8192
"""Tokens in a batch of windows, unless one window has more."""
GROUPS = 64
"""Groups of places that losses by position are averaged over."""


def score_lengths(
    model: PreTrainedModel,
    text: Text,
    lengths: Sequence[int],
    *,
    name: str,
    tokenizer: str = "",
    protocol: Protocol = "fair",
    windows: int = 256,
    stride: int | None = None,
    chunk: int | None = None,
) -> list[Score]:
    """One score per length; a length that the model or the machine cannot take says so in its score."""
    lengths = checked_lengths(lengths)
    model.eval()
    found = []
    for length in lengths:
        chosen = plan(
            protocol,
            len(text),
            length,
            shortest=lengths[0],
            longest=lengths[-1],
            windows=windows,
            stride=stride,
        )
        try:
            check_length(model, length)
            part = chunk or fitting_chunk(model, length=length, scored=chosen.windows[0].scored)
            found.append(_score(model, text, chosen, name=name, tokenizer=tokenizer, chunk=part))
        except (PositionError, MemoryError) as error:
            found.append(Score(name, length, chosen.words, text.source, tokenizer, refused=str(error)))
    return found


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in rising order, each once; an error if there are none."""
    if not lengths:
        raise ValueError("there must be a length to measure at; none came. Give e.g. 128 256 512.")
    for length in lengths:
        check_int("length", length, "It counts tokens.")
    return sorted(set(lengths))


def _score(model: PreTrainedModel, text: Text, chosen: Plan, *, name: str, tokenizer: str, chunk: int | None) -> Score:
    length = chosen.windows[0].length
    began = time.perf_counter()
    losses = np.concatenate([row for rows in _losses(model, text, chosen, chunk, name) for row in rows])
    places = np.concatenate([np.arange(w.targets.start, w.targets.stop) for w in chosen.windows])
    inside = np.concatenate([np.arange(w.length - w.scored, w.length) for w in chosen.windows])
    documents, which = np.unique(text.document[places], return_inverse=True)
    checksum = hashlib.sha256(text.tokens[places].tobytes() + places.tobytes())
    return Score(
        name=name,
        length=length,
        protocol=chosen.words,
        source=text.source,
        tokenizer=tokenizer,
        targets=checksum.hexdigest()[:16],
        documents=documents.tolist(),
        nats=np.bincount(which, weights=losses).tolist(),
        tokens=np.bincount(which).tolist(),
        bytes=np.bincount(which, weights=text.size[places]).astype(int).tolist(),
        positions=_by_position(inside, losses),
        seconds=time.perf_counter() - began,
    )


def _losses(
    model: PreTrainedModel, text: Text, chosen: Plan, chunk: int | None, name: str
) -> list[list[NDArray[np.float64]]]:
    """The losses of each window in turn; windows with as many scored tokens go through the model together."""
    at_once = max(1, BATCH // chosen.windows[0].length)
    bar = tqdm(
        total=len(chosen.windows),
        desc=f"{name} at {chosen.windows[0].length:,}",
        unit="window",
        leave=False,
        disable=not sys.stderr.isatty(),
    )
    found = []
    with bar:
        for scored, group in groupby(chosen.windows, lambda window: window.scored):
            alike = list(group)
            for first in range(0, len(alike), at_once):
                batch = alike[first : first + at_once]
                losses = token_losses(model, _stacked(text, batch).to(model.device), scored=scored, chunk=chunk)
                found.append(list(losses.double().cpu().numpy()))
                bar.update(len(batch))
    return found


def _stacked(text: Text, windows: Sequence[Window]) -> torch.Tensor:
    return torch.from_numpy(np.stack([text.tokens[w.begin : w.begin + w.length + 1] for w in windows]))


def _by_position(inside: NDArray[np.int64], losses: NDArray[np.float64]) -> list[tuple[int, float]]:
    borders = np.unique(np.linspace(inside.min(), inside.max() + 1, GROUPS + 1).astype(int))
    group = np.searchsorted(borders, inside, side="right") - 1
    means = np.bincount(group, weights=losses) / np.bincount(group)
    return [(int(border), float(mean)) for border, mean in zip(borders[1:] - 1, means, strict=True)]
