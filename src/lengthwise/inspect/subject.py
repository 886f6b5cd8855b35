"""What `lengthwise show` looks at, from its name: an encoding, a run, a checkpoint folder, or a name on the hub."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lengthwise.data import Split, load_tokenizer
from lengthwise.encodings import ENCODINGS
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.checkpoint_checks import refuse_pickles
from lengthwise.runs import Run

TRAINED_AT = 512
"""The training length of the paper's figures."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, how to read text into it, and where to take text from if none is given."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str
    trained: bool
    split: Split = "held-out"


def find_subject(what: str, *, seed: int, trust_remote_code: bool = False) -> Subject:
    """The model of that name, or an error that says what names there are."""
    if what in ENCODINGS:
        return initial(what, {}, seed=seed)
    folder = Path(what)
    near = difflib.get_close_matches(what, ENCODINGS, n=1, cutoff=0.75)
    if near and not folder.exists():
        # Before the hub is asked for it, which takes long where there is no network.
        raise ValueError(f"{what!r} is neither an encoding nor a folder that is there. Did you mean {near[0]!r}?")
    if folder.is_dir() and Run.is_run(folder):
        run = Run(folder)
        model, tokenizer = _load(str(run.final), trust_remote_code=False)
        # Data that was named as held out is so as a whole; else it is the part of the data that was kept back.
        other, data = run.config.get("held_out"), run.config.get("data", "stdlib")
        return Subject(run.name, model, tokenizer, other or data, trained=True, split="all" if other else "held-out")
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"what is shown must be an encoding, a run, a checkpoint folder or a name on the hub; {what} has neither "
            "the config.yaml of a run nor the config.json of a checkpoint. Name another."
        )
    model, tokenizer = _load(what, trust_remote_code=trust_remote_code)
    return Subject(folder.name, model, tokenizer, "stdlib", trained=True)


def initial(encoding: str, options: Mapping[str, Any], *, seed: int) -> Subject:
    """A GPT-2 Small that was not trained, reading bytes; the same for the same seed."""
    tokenizer = load_tokenizer("bytes")
    config = LengthwiseConfig.preset(
        "small",
        encoding=encoding,
        encoding_options=dict(options),
        n_positions=TRAINED_AT,
        vocab_size=len(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LengthwiseForCausalLM(config)
    return Subject("GPT-2 Small at its initial parameters", model, tokenizer, "stdlib", trained=False)


def _load(name: str, *, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    refuse_pickles(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ValueError as fault:
        if "trust_remote_code" not in str(fault):
            raise
        raise ValueError(
            f"{name} needs code of its own to be loaded, which could do anything; it was not asked for. "
            "If you trust it, pass --trust-remote-code."
        ) from None
    except OSError as fault:
        raise ValueError(
            f"what is shown must be an encoding, a run, a checkpoint folder or a name on the hub; {name!r} is none "
            f"that can be read here ({str(fault).splitlines()[0]}). See `lengthwise encodings`, or check the name."
        ) from None
    model = _class_for(config).from_pretrained(
        name, config=config, trust_remote_code=trust_remote_code, use_safetensors=True
    )
    return model, _tokenizer(name, trust_remote_code=trust_remote_code)


def _class_for(config: Any) -> Any:
    """The class that loads a checkpoint with the head that it was trained with, if it has a head for text."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return AutoModelForCausalLM if remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def _tokenizer(name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, if there is one."""
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return found
