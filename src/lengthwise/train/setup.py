"""What a run has before its first step, made from its config: data and model; and the dry run, without them."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lengthwise.data import Split, Tokens, load_tokenizer, prepare
from lengthwise.data.sources import resolve
from lengthwise.data.tokenizers import start_token, tokenizer_hash, with_mask_token
from lengthwise.distributed.model import check_spreadable
from lengthwise.loading import load_model, resolve_checkpoint
from lengthwise.model import LengthwiseConfig, LengthwiseEncoderConfig, LengthwiseForCausalLM, LengthwiseForMaskedLM
from lengthwise.model.families import max_length
from lengthwise.model.modeling import LengthwisePreTrainedModel
from lengthwise.train.config import ResolvedTrainConfig, TrainConfig
from lengthwise.train.distributed import encoding_parameters
from lengthwise.train.estimate import Hardware, describe_needs, estimate
from lengthwise.train.positions import PositionRule
from lengthwise.train.theirs import fitted_model, start_tokenizer

GPT2_VOCABULARY = 50_257
MODELS: dict[str, type[LengthwisePreTrainedModel]] = {"causal": LengthwiseForCausalLM, "mlm": LengthwiseForMaskedLM}
"""The model of each objective that predicts tokens."""


def read_tokenizer(config: ResolvedTrainConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of a run, learned from its data if it must be."""
    tokenizer = start_tokenizer(config) if config.goes_on else load_tokenizer(config.tokenizer, source=config.data)
    return with_mask_token(tokenizer, config.tokenizer) if config.objective == "mlm" else tokenizer


def read_data(config: ResolvedTrainConfig) -> tuple[PreTrainedTokenizerFast, Tokens, Tokens]:
    """The tokenizer, the tokens to train on and the held-out ones; processes of one machine wait for the first."""
    files: dict[str, Any] = {"verify": os.environ.get("LOCAL_RANK", "0") == "0", "store": config.token_store}
    tokenizer = read_tokenizer(config)
    splits: tuple[Split, Split] = ("fitting", "validation") if config.tuning else ("train", "held-out")
    if config.held_out is None:
        train, held_out = (prepare(config.data, tokenizer, split=split, **files) for split in splits)
    else:
        sources = (config.data, config.held_out)
        train, held_out = (prepare(source, tokenizer, split="all", **files) for source in sources)
    if config.objective == "causal":  # as in evaluation: without it a pretrained model predicts nonsense
        train.start = held_out.start = start_token(tokenizer)
    return tokenizer, train, held_out


def model_config(
    config: ResolvedTrainConfig,
    vocabulary: int,
    *,
    start: int | None = None,
    end: int | None = None,
    padding: int | None = None,
) -> LengthwiseConfig:
    """The model's config; the vocabulary is rounded up to 64, which suits matrix units: 50,257 is 50,304."""
    sizes = {"n_positions": config.length, "vocab_size": -(-vocabulary // 64) * 64} | (config.sizes or {})
    config_class = LengthwiseConfig if config.objective == "causal" else LengthwiseEncoderConfig
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    if unknown := [name for name in config.sizes or {} if name not in known]:
        # transformers would take it, and nothing would come of it.
        raise ValueError(f"sizes must be options of {config_class.__name__}, such as n_layer, got {unknown[0]!r}")
    try:
        return config_class.preset(
            config.preset,
            encoding=config.encoding,
            encoding_options=config.encoding_options,
            share_encoding=config.share_encoding,
            layers=config.layers,
            bos_token_id=end if start is None else start,
            eos_token_id=end,
            pad_token_id=padding,
            **sizes,
        )
    except StrictDataclassError as error:
        raise ValueError(
            f"sizes must be of the types of {config_class.__name__}, got {config.sizes}: {error}"
        ) from error


def make_model(config: ResolvedTrainConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model that predicts tokens, before its first step."""
    if config.goes_on:
        return fitted_model(config, tokenizer)
    padding = tokenizer.pad_token_id if config.objective == "mlm" else None
    start = start_token(tokenizer) if config.objective == "causal" else None
    own = model_config(config, len(tokenizer), start=start, end=tokenizer.eos_token_id, padding=padding)
    model: LengthwisePreTrainedModel = MODELS[config.objective](own)
    if config.start_from is not None:
        start_weights(model, config.start_from, tokenizer)
    return model


def matmul_dtype(config: ResolvedTrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; weights, gradients and encodings are always float32."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if config.precision == "bfloat16" else torch.float32


def check_positions(config: ResolvedTrainConfig, model: PreTrainedModel) -> None:
    """An error for drawn positions that are malformed, or beyond what an encoding has."""
    if config.positions is None:
        return
    needed = PositionRule.parse(config.positions, config.length).limit
    limit = max_length(model)
    if limit is not None and limit < needed:
        raise ValueError(
            f"--positions {config.positions} needs {needed:,} positions, but the encoding {config.tuned_by!r} has "
            f"{limit:,}; use another encoding, or fewer positions"
        )


def start_weights(model: LengthwisePreTrainedModel, source: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a new model the weights of another one's parts, all but its encodings, which may be others."""
    other = load_model(source)
    if other.tokenizer is None or tokenizer_hash(other.tokenizer) != tokenizer_hash(tokenizer):
        raise ValueError(f"--start-from must have the run's own tokenizer, got {source} with another; see --tokenizer")
    own = {id(p) for p in encoding_parameters(model)}
    given = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) in own:
            continue
        if name not in given or given[name].shape != parameter.shape:
            got = tuple(given[name].shape) if name in given else "none"
            raise ValueError(f"--start-from must have {name} of {tuple(parameter.shape)}, got {got} in {source}")
        parameter.data.copy_(given[name].data)


def dry_run(config: TrainConfig) -> str:
    """A few lines on what would be trained; every error that a config alone can have is raised."""
    resolved = config.resolved()
    if resolved.goes_on:
        return _dry_run_of_theirs(resolved)
    if resolved.objective == "contrastive":
        return _contrastive_dry_run(resolved)
    resolve(resolved.data)
    with torch.device("meta"):
        model = MODELS[resolved.objective](model_config(resolved, vocabulary_size(resolved)))
    check_positions(resolved, model)
    if resolved.context_parallel > 1:
        check_spreadable(model.config)
    hardware = Hardware.parse({"devices": resolved.context_parallel, **(resolved.hardware or {})})
    needs = estimate(resolved, model, hardware)
    learned = sum(parameter.numel() for parameter in encoding_parameters(model))
    return "\n".join(
        (
            f"model     {resolved.preset} with {model.config.label}: {model.num_parameters():,} parameters, "
            f"{learned:,} of them the encoding's",
            f"data      {resolved.data}, tokenizer {resolved.tokenizer}",
            *_steps_and_rates(resolved),
            *describe_needs(resolved, needs, hardware),
        )
    )


def _dry_run_of_theirs(config: ResolvedTrainConfig) -> str:
    assert config.start_from is not None
    resolve(config.data)
    tokenizer = start_tokenizer(config)
    check_positions(config, fitted_model(config, tokenizer))
    encoding = config.encoding or config.layers or "its encoding"
    return "\n".join(
        (
            f"model     {resolve_checkpoint(config.start_from)} with {encoding}",
            f"data      {config.data}, tokenizer of {len(tokenizer):,} tokens",
            *_steps_and_rates(config),
        )
    )


def _steps_and_rates(config: ResolvedTrainConfig) -> tuple[str, str]:
    tokens = config.steps * config.batch_tokens
    return (
        f"tokens    {tokens:,} in {config.steps:,} steps of {config.sequences:,} x {config.length:,}",
        f"rate      {config.optimizer}, up to {config.learning_rate:g} in {config.warmup:,} steps, then down "
        f"to {config.final_learning_rate:g}; {config.encoding_learning_rate:g} for the encoding's parameters",
    )


def _contrastive_dry_run(config: ResolvedTrainConfig) -> str:
    assert config.start_from is not None
    config.check_one_batch(Hardware.parse(config.hardware or {}).devices)
    pairs = f"{config.sequences:,} pairs a step, with {config.hard_negatives} hard negative(s) each"
    return "\n".join(
        (
            f"model     {resolve_checkpoint(config.start_from)}, pooled by {config.pooling}",
            f"data      {config.data}, documents of {config.length:,} tokens",
            f"pairs     {pairs}, {config.steps:,} steps",
            f"rate      {config.optimizer}, up to {config.learning_rate:g} in {config.warmup:,} steps, then down to "
            f"{config.final_learning_rate:g}",
        )
    )


def vocabulary_size(config: ResolvedTrainConfig) -> int:
    """The size of a run's tokenizer, which is not learned or downloaded for it."""
    tokenizer, more = config.tokenizer, int(config.objective == "mlm")
    if match := re.fullmatch(r"bpe:(\d+)", tokenizer):
        return int(match[1]) + more
    if tokenizer == "gpt2" and not Path(tokenizer).exists():
        return GPT2_VOCABULARY + more
    loaded = load_tokenizer(tokenizer)
    return len(with_mask_token(loaded, tokenizer) if more else loaded)
