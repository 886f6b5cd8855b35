"""A model's loss against the length it reads, under a protocol: any causal language model of transformers.

The loss of each scored token of a batch of windows is computed in one pass or in chunks through the cache. Chunks give
the same losses and need memory for one chunk and the cache only. What every length needs is known before the first is
computed; one whose cache alone does not fit is refused.

Under torchrun all processes share each window of a Lengthwise model, by ring attention: each needs memory for its own
part, and all get all losses.

Where a tokenizer begins every text with a token of its own, as Gemma's does, that stands in the place of a window's
first token: such models predict nonsense without it.
"""

import hashlib
import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lengthwise.distributed import ring_loss
from lengthwise.distributed.model import check_spreadable, sharing_processes
from lengthwise.encodings import PositionError
from lengthwise.errors import check_int
from lengthwise.evaluate.config import Protocol
from lengthwise.evaluate.corpus import Corpus, TextWindow, TextWindowPlan, plan_text_windows
from lengthwise.evaluate.memory import LOGIT_ROWS, bytes_needed, fitting_batch, fitting_chunk, length_dependent, sharing
from lengthwise.evaluate.progress import Progress, work
from lengthwise.evaluate.score import Score
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.model.families import check_length
from lengthwise.model.losses import head_loss, head_weight

log = logging.getLogger(__name__)
NO_POSITIONS = "at every place: the rotary angles depend on the length, so each place would need a window of its own"
NO_CHUNKS = (
    "chunks would not give the losses of one pass: the rotary angles of this model depend on the length, so keys that "
    "are cached early differ; leave chunk out"
)
POSITION_GROUPS = 64
"""Groups of places that losses by position are averaged over."""


@dataclass(frozen=True)
class LengthPlan:
    """What will be computed at one length, or why it cannot be."""

    plan: TextWindowPlan
    chunk: int | None = None
    batch: int = 1
    """How many windows go through the model together."""
    every_place: bool = False
    """Whether the loss is wanted at every place of the windows."""
    bytes: int = 0
    """About how much memory that takes beside the weights."""
    refused: str | None = None

    @property
    def length(self) -> int:
        """That of its windows."""
        return self.plan.windows[0].length

    @property
    def work(self) -> float:
        """For the time left."""
        return 0.0 if self.refused else work(self.length, len(self.plan.windows))


def score_lengths(
    model: PreTrainedModel,
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    name: str,
    tokenizer: str = "",
    protocol: Protocol = "fair",
    windows: int = 256,
    stride: int | None = None,
    chunk: int | None = None,
    by_position: bool = False,
    progress: Progress | None = None,
) -> list[Score]:
    """One score per length; for a length that the model or the machine cannot take the score has the reason."""
    plans = plan_lengths(
        model,
        len(corpus),
        lengths,
        protocol=protocol,
        windows=windows,
        stride=stride,
        chunk=chunk,
        by_position=by_position,
    )
    if progress is None:
        with Progress(sum(plan.work for plan in plans)) as own:
            return score_plans(model, corpus, plans, name=name, tokenizer=tokenizer, progress=own)
    return score_plans(model, corpus, plans, name=name, tokenizer=tokenizer, progress=progress)


def plan_lengths(
    model: PreTrainedModel,
    total: int,
    lengths: Sequence[int],
    *,
    protocol: Protocol = "fair",
    windows: int = 256,
    stride: int | None = None,
    chunk: int | None = None,
    by_position: bool = False,
) -> list[LengthPlan]:
    """What will be computed at every length in a text of `total` tokens, without computing any of it."""
    lengths = checked_lengths(lengths)
    if chunk is not None and sharing_processes() > 1:
        raise ValueError(
            f"chunks go through a cache, which processes cannot share, got --chunk {chunk} and {sharing_processes()} "
            "processes; leave out --chunk, or start one process"
        )
    if by_position and length_dependent(model):
        log.warning("there are no losses %s", NO_POSITIONS)
        by_position = False
    ends = {"shortest": lengths[0], "longest": lengths[-1]}
    plans = []
    for length in lengths:
        plan = plan_text_windows(protocol, total, length, windows=windows, stride=stride, **ends)
        every = by_position and length == lengths[-1]
        scored = length if every else plan.windows[0].scored
        try:
            check_length(model, length)
            processes, rows = sharing(model, length), min(scored, LOGIT_ROWS) if every else scored
            part = chunk or fitting_chunk(model, length=length, scored=rows, processes=processes)
            if part is not None and part < length and length_dependent(model):
                raise NotImplementedError(NO_CHUNKS)
            if part is None and processes > 1 and isinstance(model, LengthwiseForCausalLM):
                check_spreadable(model.config)
            if every and not isinstance(model, LengthwiseForCausalLM):
                # Logits of a whole window would not fit; those of a chunk do.
                part = min(part or LOGIT_ROWS, LOGIT_ROWS)
            batch = fitting_batch(model, length=length, scored=scored, chunk=part, processes=processes)
            need = bytes_needed(model, length=length, scored=scored, batch=batch, chunk=part, processes=processes)
            plans.append(LengthPlan(plan, part, batch, every, need))
        except (PositionError, MemoryError, NotImplementedError) as error:
            plans.append(LengthPlan(plan, refused=str(error)))
    return plans


def score_plans(
    model: PreTrainedModel,
    corpus: Corpus,
    plans: Sequence[LengthPlan],
    *,
    name: str,
    tokenizer: str,
    progress: Progress,
) -> list[Score]:
    """What was planned, computed."""
    model.eval()
    scores = []
    for plan in plans:
        progress.start(f"{name} at {plan.length:,}")
        if plan.refused is None:
            scores.append(_score(model, corpus, plan, name=name, tokenizer=tokenizer, progress=progress))
        else:
            description = plan.plan.description
            scores.append(Score(name, plan.length, description, corpus.source, tokenizer, refused=plan.refused))
    return scores


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in rising order, each once; an error if there are none."""
    if not lengths:
        raise ValueError("there must be a length to measure at, got none; give e.g. --lengths 128 256 512")
    for length in lengths:
        check_int("length", length)
    return sorted(set(lengths))


def _score(
    model: PreTrainedModel, corpus: Corpus, planned: LengthPlan, *, name: str, tokenizer: str, progress: Progress
) -> Score:
    plan, length = planned.plan, planned.length
    began = time.perf_counter()
    rows = [row for rows in _losses(model, corpus, planned, progress) for row in rows]
    losses = np.concatenate([row[len(row) - w.scored :] for row, w in zip(rows, plan.windows, strict=True)])
    places = np.concatenate([np.arange(w.targets.start, w.targets.stop) for w in plan.windows])
    inside = np.concatenate([np.arange(length - len(row), length) for row in rows])
    documents, which = np.unique(corpus.document[places], return_inverse=True)
    checksum = hashlib.sha256(corpus.tokens[places].tobytes() + places.tobytes())
    return Score(
        name=name,
        length=length,
        protocol=plan.description,
        source=corpus.source,
        tokenizer=tokenizer,
        targets=checksum.hexdigest()[:16],
        documents=documents.tolist(),
        nats=np.bincount(which, weights=losses).tolist(),
        tokens=np.bincount(which).tolist(),
        bytes=np.bincount(which, weights=corpus.size[places]).astype(int).tolist(),
        positions=_by_position(inside, np.concatenate(rows)),
        seconds=time.perf_counter() - began,
    )


def _losses(
    model: PreTrainedModel, corpus: Corpus, planned: LengthPlan, progress: Progress
) -> list[list[NDArray[np.float64]]]:
    """The losses of each window in turn; windows with as many scored tokens go through the model together."""
    losses = []
    for scored, group in groupby(planned.plan.windows, lambda window: window.scored):
        alike = list(group)
        for first in range(0, len(alike), planned.batch):
            batch = alike[first : first + planned.batch]
            tokens = _stacked(corpus, batch).to(model.device)
            wanted = planned.length if planned.every_place else scored
            nats = token_losses(model, tokens, scored=wanted, chunk=planned.chunk)
            losses.append(list(nats.cpu().double().numpy()))
            progress.done(planned.length, len(batch))
    return losses


def _stacked(corpus: Corpus, windows: Sequence[TextWindow]) -> torch.Tensor:
    tokens = np.stack([corpus.tokens[w.begin : w.begin + w.length + 1] for w in windows])
    if corpus.start is not None:
        tokens[:, 0] = corpus.start
    return torch.from_numpy(tokens)


def _by_position(inside: NDArray[np.int64], losses: NDArray[np.float64]) -> list[tuple[int, float]]:
    borders = np.unique(np.linspace(inside.min(), inside.max() + 1, POSITION_GROUPS + 1).astype(int))
    group = np.searchsorted(borders, inside, side="right") - 1
    means = np.bincount(group, weights=losses) / np.bincount(group)
    return [(int(border), float(mean)) for border, mean in zip(borders[1:] - 1, means, strict=True)]


@torch.no_grad()
def token_losses(
    model: PreTrainedModel, tokens: Int[Tensor, "batch position"], *, scored: int, chunk: int | None = None
) -> Float[Tensor, "batch scored"]:
    """-log p of the last `scored` tokens, each from those before it in its window; float32."""
    inputs, targets = tokens[:, :-1], tokens[:, tokens.shape[1] - scored :]
    length = inputs.shape[1]
    if chunk is None and isinstance(model, LengthwiseForCausalLM) and sharing(model, length) > 1:
        return ring_loss(model, inputs, tokens, reduction="none")[:, length - scored :]
    if chunk is None or chunk >= length:
        return _last_losses(model, inputs, targets, None)
    check_int("chunk", chunk)
    if length_dependent(model):
        raise ValueError(NO_CHUNKS)
    cache, losses = DynamicCache(config=model.config), []
    for first in range(0, length, chunk):
        part = inputs[:, first : first + chunk]
        begin, stop = (max(0, place - (length - scored)) for place in (first, first + part.shape[1]))
        losses.append(_last_losses(model, part, targets[:, begin:stop], cache))
    return torch.cat(losses, 1)


def _last_losses(model: PreTrainedModel, inputs: Tensor, targets: Tensor, cache: DynamicCache | None) -> Tensor:
    """The losses of predicting `targets` from the last of the inputs."""
    keep = targets.shape[1]
    if isinstance(model, LengthwiseForCausalLM):
        x = model.transformer(inputs, past_key_values=cache, use_cache=cache is not None).last_hidden_state
        return head_loss(x[:, x.shape[1] - keep :], head_weight(model.lm_head), targets, reduction="none")
    flat = last_logits(model, inputs, keep, cache).flatten(0, 1)
    labels = targets.flatten().to(flat.device)
    pairs = zip(flat.split(LOGIT_ROWS), labels.split(LOGIT_ROWS), strict=True)
    parts = [F.cross_entropy(rows.float(), part, reduction="none") for rows, part in pairs]
    return (torch.cat(parts) if parts else flat.new_zeros(0)).view(targets.shape)


def last_logits(
    model: PreTrainedModel, inputs: Int[Tensor, "batch position"], keep: int, cache: DynamicCache | None = None
) -> Float[Tensor, "batch keep word"]:
    """The logits after the last `keep` inputs; the head runs on no others where the model can leave them out."""
    arguments: dict[str, object] = {"use_cache": cache is not None}
    if cache is not None:
        arguments["past_key_values"] = cache
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # 0 would mean all.
        arguments["logits_to_keep"] = max(1, keep)
    logits: Tensor = model(inputs, **arguments).logits
    return logits[:, logits.shape[1] - keep :]
