"""From a name to a model, and to text for it to read: the one place where either is resolved.

    cable                       an encoding, or several, "rope+fox": a GPT-2 Small with it, at its initial parameters
    runs/first                  a run of `lengthwise train`: its final model
    checkpoints/gpt2            a checkpoint folder of transformers
    EleutherAI/pythia-70m       a name on the hub

Weights must be in safetensors; a pickle is refused. Code that comes with a checkpoint runs only on request.
"""

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from jaxtyping import Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from lengthwise.data import Split, documents, load_tokenizer
from lengthwise.data.tokenizers import encode, saved_tokenizer, tokenizer_hash
from lengthwise.encodings import ENCODINGS
from lengthwise.encodings.registry import is_encoding
from lengthwise.errors import OptionError, UserError, check_int
from lengthwise.files import missing_path
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.adapters import fitted_config
from lengthwise.model.adapters import load as load_fitted
from lengthwise.model.checkpoint_checks import refuse_pickles
from lengthwise.model.fit_files import marked_config
from lengthwise.runs import Run

INITIAL_LENGTH = 512
"""The training length that an encoding by name is made for: that of the CABLE paper's figures."""

_EXPECTED = "expected an encoding, a run, a checkpoint folder or a name on the hub"

LONGEST = 2**20
"""Tokens of a sample at most: no map of more can be drawn."""

POOL_DOCUMENTS, POOL_CHARACTERS = 256, 2**24
"""A random document is drawn from the first so many of a split; a data set of the hub is never read to its end."""


class LoadError(UserError, ValueError):
    """There is no model of that name, or it cannot be read."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, its tokenizer, and where text for it comes from if none is given."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    trained: bool
    source: str = "stdlib"
    split: Split = "held-out"

    @property
    def train_length(self) -> int | None:
        """The length that the model was trained at, as far as its config says."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> str:
        """The same for tokenizers that are the same; "" without one."""
        return "" if self.tokenizer is None else tokenizer_id(self.tokenizer)


def load_model(
    source: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """The model of that name, in evaluation mode; `seed` is for an encoding's initial parameters.

    device  "cpu", "cuda", or "auto" for a GPU if there is one
    dtype   "auto" is the checkpoint's own
    """
    place = resolve_device(device)
    if is_encoding(str(source)):
        loaded = initial_model(str(source), seed=seed)
        return replace(loaded, name=name or loaded.name, model=_on(place, loaded.model))
    checkpoint = resolve_checkpoint(source)
    with progress_bars_on_terminals_only():
        model, tokenizer = _from_pretrained(checkpoint, dtype, trust_remote_code=trust_remote_code)
    model = _on(place, model).eval()
    if not Run.is_run(source):
        return LoadedModel(name or Path(source).resolve().name, model, tokenizer, trained=True)
    run = Run(source)
    # Data that was named as held out is so as a whole; else it is the held-out part of the data.
    other, data = run.config.get("held_out"), run.config.get("data", "stdlib")
    split: Split = "all" if other else "held-out"
    return LoadedModel(name or run.name, model, tokenizer, trained=True, source=other or data, split=split)


def tokenizer_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that are the same, fast or not."""
    return tokenizer_hash(tokenizer)[:16]


def load_tokenizer_of(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a run, a checkpoint folder or a name on the hub; None if it has none."""
    checkpoint = resolve_checkpoint(source)
    with readable(checkpoint):
        return _tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def load_config_of(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a run, a checkpoint folder or a name on the hub, without its weights; errors as `load_model`'s."""
    checkpoint = resolve_checkpoint(source)
    refuse_pickles(checkpoint)
    with readable(checkpoint):
        fitted = fitted_config(checkpoint)
        config: PreTrainedConfig = fitted or AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        return config


def initial_model(
    encoding: str, options: Mapping[str, Any] | None = None, *, preset: str = "small", seed: int = 0
) -> LoadedModel:
    """A model that was not trained, reading bytes; the same for the same seed."""
    tokenizer = load_tokenizer("bytes")
    config = LengthwiseConfig.preset(
        preset,
        encoding=encoding,
        encoding_options=dict(options or {}),
        n_positions=INITIAL_LENGTH,
        vocab_size=len(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LengthwiseForCausalLM(config).eval()
    return LoadedModel(f"GPT-2 {preset.capitalize()} at its initial parameters", model, tokenizer, trained=False)


def resolve_checkpoint(source: str | Path) -> str:
    """The folder of a run's final model, a checkpoint folder or the only one in a folder, or a name on the hub."""
    folder = Path(source)
    if Run.is_run(folder):
        return str(Run(folder).final)
    if folder.exists() and not (folder / "config.json").is_file():
        return str(_only_checkpoint(folder))
    if (fault := missing_path(source)) is not None:
        raise LoadError(f"{_EXPECTED}, got {str(source)!r}: {fault}")
    close = difflib.get_close_matches(str(source), ENCODINGS, n=1, cutoff=0.75)
    if close and not folder.exists():
        # Before a request to the hub, which takes long where there is no network.
        raise LoadError(f"{_EXPECTED}, got {str(source)!r}; did you mean {close[0]!r}?")
    if "/" not in str(source) and not folder.exists() and (fault := _fault_of_bare_name(str(source))) is not None:
        raise LoadError(f"{_EXPECTED}, got {str(source)!r}: {fault}")
    return str(source)


def _fault_of_bare_name(name: str) -> str | None:
    """What is wrong with a name that is no folder and has no owner; None where the hub has it, as it has gpt2.

    transformers would ask the hub again and again, for most of a minute, about a folder whose name is mistyped.
    """
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except GatedRepoError:
        return None
    except HFValidationError:
        fault = "no model on the hub can have this name"
    except RepositoryNotFoundError:
        fault = "there is no such model on the hub"
    except HfHubHTTPError:  # it is there; what is wrong with it shows when it is loaded
        return None
    except Exception as error:  # of the network's library, another one with every version of the hub's
        fault = f"the hub cannot be asked: {_first_line(error)}"
    else:
        return None
    near = difflib.get_close_matches(name, [path.name for path in Path().iterdir() if path.is_dir()], n=1, cutoff=0.75)
    return f"there is no such folder here, and {fault}" + (f"; did you mean {near[0]!r}?" if near else "")


def _only_checkpoint(folder: Path) -> Path:
    """The one checkpoint somewhere in a folder, as a trainer leaves it."""
    weights = folder.rglob("*.safetensors") if folder.is_dir() else ()
    checkpoints = sorted({path.parent for path in weights if (path.parent / "config.json").is_file()})
    if len(checkpoints) != 1:
        got = (
            f"which has several: {', '.join(map(str, checkpoints))}"
            if checkpoints
            else "which has neither config.yaml nor config.json"
        )
        raise LoadError(f"{_EXPECTED}, got {str(folder)!r}, {got}")
    return checkpoints[0]


def resolve_device(device: str) -> torch.device:
    """A device by name; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        if place.type == "cuda":
            # Nothing is allocated: each process of a run would take memory of the first GPU.
            if (place.index or 0) >= torch.cuda.device_count():
                raise RuntimeError(f"torch finds {torch.cuda.device_count()} GPUs")
        else:
            torch.zeros(1, device=place).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise LoadError(f"device must be 'auto' or one that works here, got {device!r}: {_first_line(error)}") from None
    return place


def local_device(name: str) -> torch.device:
    """A device by name; of several processes on one machine each has the GPU with its own number."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device


@contextmanager
def undamaged(checkpoint: str) -> Iterator[None]:
    """A LoadError where a file of a checkpoint is damaged, for which transformers and safetensors have many others."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, LookupError, RuntimeError, SafetensorError, StrictDataclassError, TypeError) as error:
        # The first line of such an error names the field, the others what is wrong with it.
        words = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else _first_line(error)
        fault = f"{type(error).__name__}: {words}"
        raise LoadError(f"{checkpoint!r} is damaged, or no checkpoint: {fault}") from error


@contextmanager
def readable(checkpoint: str) -> Iterator[None]:
    """A LoadError that names a checkpoint, or what was taken for one, where it cannot be read."""
    try:
        with undamaged(checkpoint):
            yield
    except OptionError as error:
        raise OptionError(f"{checkpoint!r} cannot be loaded: {error}") from error
    except LoadError:
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise LoadError(
                f"{checkpoint} brings code of its own, which could do anything; if you trust it, pass "
                "--trust-remote-code"
            ) from None
        place = "" if Path(checkpoint).exists() else "there is no such folder here, and as a name on the hub: "
        fault = place + _first_line(error)
        raise LoadError(f"{_EXPECTED}, got {checkpoint!r}, which cannot be loaded: {fault}") from error


def _from_pretrained(
    checkpoint: str, dtype: torch.dtype | str, *, trust_remote_code: bool
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    refuse_pickles(checkpoint)
    with readable(checkpoint):
        if marked_config(checkpoint) is not None:
            return load_fitted(checkpoint, dtype=dtype), _tokenizer(checkpoint, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        options = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code, "use_safetensors": True}
        model = _with_its_head(_class_for(config), checkpoint, options)
        return model, _tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _on(device: torch.device, model: Any) -> PreTrainedModel:
    moved: PreTrainedModel = model.to(device)  # whose signature transformers hides
    return moved


def _with_its_head(loader: Any, checkpoint: str, options: dict[str, Any]) -> Any:
    """The model; without a head for masked tokens where only its name was saved, as sentence encoders do."""
    if loader is not AutoModelForMaskedLM or isinstance(options["config"], LengthwiseConfig):
        return loader.from_pretrained(checkpoint, **options)
    model, info = loader.from_pretrained(checkpoint, **options, output_loading_info=True)
    return AutoModel.from_pretrained(checkpoint, **options) if info["missing_keys"] else model


def _class_for(config: Any) -> Any:
    """The class that loads a checkpoint with the head that it was trained with, if it has a head for text."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if any(name.endswith("ForMaskedLM") for name in config.architectures or ()):
        return AutoModelForMaskedLM
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return AutoModelForCausalLM if remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def _tokenizer(checkpoint: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    folder = Path(checkpoint)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    # The config of a fitted model has a mark, by which others fail to read it.
    own = fitted_config(checkpoint)
    return saved_tokenizer(checkpoint, trust_remote_code=trust_remote_code, **({} if own is None else {"config": own}))


@contextmanager
def progress_bars_on_terminals_only() -> Iterator[None]:
    """transformers draws its progress bars into log files too."""
    hide = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, eq=False)
class TokenSample:
    """Sequences for a model to read; `tokens` are those of the first, `description` says where they come from."""

    ids: Int[Tensor, "batch position"]
    tokens: tuple[str, ...]
    description: str


def sample_tokens(
    loaded: LoadedModel, *, length: int | None, text: str | None = None, seed: int = 0, count: int = 1
) -> TokenSample:
    """`count` sequences of one length, the first of them the text if there is one, which has a length of its own.

    Each of the others is a random place in a random document, running on into others until it is long enough. A model
    without a tokenizer reads random tokens.
    """
    if length is not None or text is None:
        check_int("length", length)
    if length is not None and length > LONGEST:
        raise ValueError(f"length must be at most {LONGEST:,} tokens, got {length:,}")
    generator = torch.Generator().manual_seed(seed)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        if text is not None:
            raise ValueError(
                f"a text needs a tokenizer, and {loaded.name} has none; leave out --text for random tokens"
            )
        size = loaded.model.config.get_text_config().vocab_size
        ids = torch.randint(size, (count, int(length or 0)), generator=generator)
        return TokenSample(ids, tuple(map(str, ids[0].tolist())), f"random tokens (there is no tokenizer), seed {seed}")
    rows, description = [], f"held-out text of {loaded.source}, seed {seed}"
    if text is not None:
        rows, description = [encode(tokenizer, text)[:length]], "the given text"
        if not rows[0]:
            raise ValueError(f"the text must have at least one token, got {text!r}")
    if len(rows) < count:
        pool = _pool(loaded)
        size = len(rows[0]) if rows else int(length or 0)
        rows += [_random_row(pool, tokenizer, size, generator) for _ in range(count - len(rows))]
    return TokenSample(torch.tensor(rows), tuple(tokenizer.convert_ids_to_tokens(rows[0])), description)


def _pool(loaded: LoadedModel) -> list[str]:
    """The first documents of the model's held-out text."""
    pool: list[str] = []
    characters = 0
    for document in documents(loaded.source, loaded.split):
        pool.append(document)
        characters += len(document)
        if len(pool) == POOL_DOCUMENTS or characters > POOL_CHARACTERS:
            break
    if not pool:
        raise ValueError(f"the {loaded.split} split of {loaded.source!r} must have text, got none")
    return pool


def _random_row(
    pool: list[str], tokenizer: PreTrainedTokenizerBase, length: int, generator: torch.Generator
) -> list[int]:
    row: list[int] = []
    while len(row) < length:
        document = pool[int(torch.randint(len(pool), (), generator=generator))]
        # A token is at least one character, so from here on there is enough text wherever the document has it.
        start = int(torch.randint(max(1, len(document) - 8 * length), (), generator=generator))
        row += encode(tokenizer, document[start : start + 32 * length])
    return row[:length]
