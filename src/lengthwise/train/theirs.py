"""Going on with a model of transformers: an encoding is fitted into it, and it is trained as our own models are.

    lengthwise train --from checkpoints/smollm2 --encoding none --out runs/drope         DroPE: its RoPE is dropped
    lengthwise train --from checkpoints/gpt2 --encoding own+kerple --out runs/kerple     its own positions stay

The tokenizer is the checkpoint's. The final model is a fitted one: `lw.load` and every command of ours know it.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lengthwise.data.tokenizers import with_end
from lengthwise.loading import LoadError, load_model, load_tokenizer_of
from lengthwise.model.families import check_length
from lengthwise.model.fit import fit, fit_of, unfit
from lengthwise.model.modeling import LengthwisePreTrainedModel
from lengthwise.train.config import ResolvedTrainConfig

log = logging.getLogger(__name__)

DROPOUTS = ("attention_dropout", "attn_pdrop")
"""What families call the dropout of attention weights."""


def start_tokenizer(config: ResolvedTrainConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the checkpoint that a run starts from."""
    assert config.start_from is not None
    tokenizer = load_tokenizer_of(config.start_from)
    if tokenizer is None:
        raise LoadError(f"--start-from must be a model with its tokenizer, got {config.start_from} without")
    return with_end(tokenizer, config.start_from)


def fitted_model(config: ResolvedTrainConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model that goes on, in float32, with the run's encoding in it, or else the one that it was fitted with."""
    assert config.start_from is not None
    model: Any = load_model(config.start_from, dtype=torch.float32).model
    name = type(model).__name__
    if isinstance(model, LengthwisePreTrainedModel) or not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"--start-from must be a decoder of transformers, got {name} in {config.start_from}")
    chosen = config.layers if config.encoding is None else config.encoding
    before = fit_of(model)
    if chosen is not None:
        if before is not None:
            unfit(model)
        fit(model, chosen, attention_dropout="leave out", **(config.encoding_options or {}))
    elif before is not None:
        before.choose_dropout("leave out")
    else:
        raise ValueError(
            f"--start-from {config.start_from} is not fitted yet, so an encoding must be given, got none; use "
            "--encoding own to leave it as it is"
        )
    rates = [getattr(model.config, dropout, 0) for dropout in DROPOUTS]
    if any(rates):
        log.info("%s trains without its attention dropout, %s", name, max(filter(None, rates)))
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer must have at most the model's {vocabulary:,} tokens, got {len(tokenizer):,}")
    check_length(model, config.length)
    return model


def summed_token_loss(
    model: Any,
    ids: Int[Tensor, "batch token"],
    labels: Int[Tensor, "batch token"],
    position_ids: Int[Tensor, "batch token"] | None,
) -> Float[Tensor, ""]:
    """The sum of the losses of predicting each label from the tokens before it."""
    placed = {} if position_ids is None else {"position_ids": position_ids}
    logits = model(ids, use_cache=False, **placed).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
