"""The loss of each scored token of a batch of windows, in one pass or in chunks through the cache.

Chunks give the same losses and need memory for one chunk and the cache only; a window whose cache alone does not fit is
refused before anything is computed.
"""

import inspect
import sys

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lengthwise.attention.memory import total_bytes
from lengthwise.errors import check_int
from lengthwise.evaluate.rope_override import length_dependent
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.model.losses import head_loss

SMALLEST_CHUNK = 256
LOGIT_ROWS = 512
"""Rows of logits turned into losses at a time."""


@torch.no_grad()
def token_losses(
    model: PreTrainedModel, tokens: Int[Tensor, "batch position"], *, scored: int, chunk: int | None = None
) -> Float[Tensor, "batch scored"]:
    """-log p of the last `scored` tokens, each from those before it in its window; float32."""
    inputs, targets = tokens[:, :-1], tokens[:, tokens.shape[1] - scored :]
    length = inputs.shape[1]
    if chunk is None or chunk >= length:
        return _last_losses(model, inputs, targets, None)
    check_int("chunk", chunk)
    if length_dependent(model):
        raise ValueError(
            "chunks would not give the losses of one pass: the rotary angles of this model depend on the length, so "
            "keys that are cached early differ; leave chunk out"
        )
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
        return head_loss(x[:, x.shape[1] - keep :], model.lm_head.weight, targets, reduction="none")
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


def bytes_needed(model: PreTrainedModel, *, length: int, scored: int, batch: int = 1, chunk: int | None = None) -> int:
    """An estimate of the memory of a pass over windows of this length, beside the weights."""
    config, item = model.config.get_text_config(), next(model.parameters()).element_size()
    heads = config.num_attention_heads
    width = config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or width // heads
    step = min(chunk or length, length)
    cache = 2 * config.num_hidden_layers * key_heads * dim * length * item if step < length else 0
    # Four widths in the feed-forward layer, twice over, the tokens, queries, keys, values and output.
    working = 16 * step * width * item
    rows = LOGIT_ROWS if isinstance(model, LengthwiseForCausalLM) else min(step, scored)
    logits = 2 * rows * config.vocab_size * 4
    scores = 2 * heads * step * length * 4 if config._attn_implementation == "eager" else 0
    return batch * (cache + working + scores + logits)


def fitting_chunk(model: PreTrainedModel, *, length: int, scored: int) -> int | None:
    """None where a window fits in half of the memory whole, else the largest chunk that does; an error if none."""
    budget = _memory(model) // 2
    need = bytes_needed(model, length=length, scored=scored)
    if need <= budget:
        return None
    chunk = length
    while chunk > SMALLEST_CHUNK and not length_dependent(model):
        chunk = max(SMALLEST_CHUNK, chunk // 2)
        need = bytes_needed(model, length=length, scored=scored, chunk=chunk)
        if need <= budget:
            return chunk
    raise MemoryError(
        f"scoring at length {length:,} must fit in half of the memory, {budget:,} bytes, but needs {need:,}; leave out "
        "that length, or use a machine with more memory"
    )


def _memory(model: PreTrainedModel) -> int:
    if model.device.type == "cuda":
        return int(torch.cuda.get_device_properties(model.device).total_memory)
    return total_bytes() or sys.maxsize
