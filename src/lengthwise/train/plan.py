"""What a config would train, without data, weights or time: for `--dry_run`, and to see that a config is sound."""

import re
from pathlib import Path

import torch

from lengthwise.data import load_tokenizer
from lengthwise.data.sources import resolve
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.train.config import TrainConfig
from lengthwise.train.loop import model_config
from lengthwise.train.processes import encoding_parameters

GPT2 = 50_257


def plan(config: TrainConfig) -> str:
    """A few lines of what would be trained; every error that a config alone can have is raised."""
    settings = config.resolved()
    resolve(settings.data)
    with torch.device("meta"):
        model = LengthwiseForCausalLM(model_config(settings, vocabulary(settings.tokenizer)))
    learned = sum(parameter.numel() for parameter in encoding_parameters(model))
    tokens = settings.steps * settings.batch_tokens
    return "\n".join(
        (
            f"model     {settings.preset} with {settings.encoding}: {model.num_parameters():,} parameters, "
            f"{learned:,} of them the encoding's",
            f"data      {settings.data}, tokenizer {settings.tokenizer}",
            f"tokens    {tokens:,} in {settings.steps:,} steps of {settings.sequences:,} x {settings.length:,}",
            f"rate      up to {settings.learning_rate:g} in {settings.warmup:,} steps, then down to "
            f"{settings.final_learning_rate:g}",
        )
    )


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer, which is not made or fetched for it."""
    if found := re.fullmatch(r"bpe:(\d+)", tokenizer):
        return int(found[1])
    if tokenizer == "gpt2" and not Path(tokenizer).exists():
        return GPT2
    return len(load_tokenizer(tokenizer))
