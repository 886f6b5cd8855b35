"""What memory a pass over windows takes, and how it is divided: chunks through a cache, or a part for each process."""

import logging
import os
import sys
from bisect import bisect_right

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lengthwise.attention.backend import total_bytes
from lengthwise.distributed.model import sharing_processes
from lengthwise.encodings import Encoding
from lengthwise.model import LengthwiseForCausalLM, LengthwiseForMaskedLM
from lengthwise.model.fit import Fit, fit_of
from lengthwise.model.stretch import stretched

log = logging.getLogger(__name__)
BATCH_TOKENS = 8192
"""Tokens in a batch of windows, unless one window has more."""
SMALLEST_CHUNK = 256
LOGIT_ROWS = 512
"""Rows of logits turned into losses at a time: of a whole batch, by our own models."""


def bytes_needed(
    model: PreTrainedModel,
    *,
    length: int,
    scored: int,
    batch: int = 1,
    chunk: int | None = None,
    processes: int = 1,
    whole_logits: bool = False,
) -> int:
    """An estimate of the memory of a pass over windows of this length in one process, beside the weights.

    Processes share a window that is not read in chunks. Losses of our own models never store the logits of all scored
    tokens at once; `whole_logits` is for a caller that does.
    """
    config, item = model.config.get_text_config(), next(model.parameters()).element_size()
    heads = config.num_attention_heads
    width = config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or width // heads
    step = -(-length // processes) if chunk is None else min(chunk, length)
    keys = 2 * key_heads * dim * item
    cache = config.num_hidden_layers * keys * length if chunk is not None and step < length else 0
    # Those of two other processes: what is worked with, and what is on its way.
    cache += 2 * keys * step if processes > 1 else 0
    # Four widths in the feed-forward layer, twice over, the tokens, queries, keys, values and output.
    working = 16 * step * width * item
    rows = batch * min(step, scored)
    if isinstance(model, (LengthwiseForCausalLM, LengthwiseForMaskedLM)) and not whole_logits:
        rows = min(rows, LOGIT_ROWS)
    logits = 2 * rows * config.vocab_size * 4
    scores = 2 * heads * step * length * 4 if config._attn_implementation == "eager" else 0
    # A window is a mask of booleans to transformers' own attention, filled in.
    windowed = config._attn_implementation == "sdpa" and getattr(config, "sliding_window", None)
    return batch * (cache + working + scores + (step * length if windowed else 0)) + logits


def fitting_chunk(model: PreTrainedModel, *, length: int, scored: int, processes: int = 1) -> int | None:
    """None where a window, or a process's part of it, fits in half of the memory, else the largest chunk that does.

    An error where none does.
    """
    budget = memory_budget(model, processes)
    need = bytes_needed(model, length=length, scored=scored, processes=processes)
    if need <= budget:
        if processes < sharing_processes():
            is_own = isinstance(model, LengthwiseForCausalLM)
            _log_whole(length, "it has too few tokens for all" if is_own else "the model is not one of Lengthwise")
        return None
    chunk = length
    while chunk > SMALLEST_CHUNK and not length_dependent(model):
        chunk = max(SMALLEST_CHUNK, chunk // 2)
        need = bytes_needed(model, length=length, scored=scored, chunk=chunk)
        if need <= budget:
            if sharing_processes() > 1:
                _log_whole(length, "only its chunks fit in memory, which are not shared")
            return chunk
    raise MemoryError(
        f"scoring at length {length:,} must fit in half of the memory, {budget:,} bytes, but needs {need:,}; leave out "
        "that length, or use a machine with more memory"
    )


def fitting_batch(
    model: PreTrainedModel,
    *,
    length: int,
    scored: int,
    chunk: int | None = None,
    processes: int = 1,
    whole_logits: bool = False,
) -> int:
    """How many windows go together: as many as BATCH_TOKENS and half of the memory have room for, but one always."""

    def need(batch: int) -> int:
        return bytes_needed(
            model,
            length=length,
            scored=scored,
            batch=batch,
            chunk=chunk,
            processes=processes,
            whole_logits=whole_logits,
        )

    most = range(1, BATCH_TOKENS // length + 1)
    return max(1, bisect_right(most, memory_budget(model, processes), key=need))


def _log_whole(length: int, reason: str) -> None:
    log.info("each of %d processes measures all of a window of %s: %s", sharing_processes(), f"{length:,}", reason)


def memory_budget(model: PreTrainedModel, processes: int = 1) -> int:
    """The bytes that a pass may take: half of the memory, where processes share windows of the least that one has."""
    return (memory_of(model) if processes == 1 else least_memory(model)) // 2


def memory_of(model: PreTrainedModel) -> int:
    """The bytes of memory where the model is, for this process: those of one machine share its memory."""
    if model.device.type == "cuda":
        return int(torch.cuda.get_device_properties(model.device).total_memory)
    return (total_bytes() or sys.maxsize) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def least_memory(model: PreTrainedModel) -> int:
    """The least that any of the processes has: one that read a window in chunks would be waited for in the ring."""
    least = torch.tensor(memory_of(model), device=model.device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def sharing(model: PreTrainedModel, length: int) -> int:
    """How many processes share a window: all, or one if it is too short for all, or the model is not ours."""
    processes = sharing_processes()
    return processes if isinstance(model, LengthwiseForCausalLM) and length >= 2 * processes else 1


def length_dependent(model: PreTrainedModel) -> bool:
    """Whether the angles change as the sequence grows."""
    if (change := stretched(model)) is not None:
        return change.length_dependent
    current = fit_of(model)
    replaced = isinstance(current, Fit) and len(current.encodings) == len(current.layers)
    if any(part.length_dependent for part in model.modules() if isinstance(part, Encoding)):
        return True
    if replaced or isinstance(model, LengthwiseForCausalLM):
        return False
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")
