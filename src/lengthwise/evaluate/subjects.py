"""What is measured: runs, checkpoint folders and names on the hub, each a model with its tokenizer and a name."""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from lengthwise.errors import OptionError
from lengthwise.evaluate.rope import Scaling, parse_scaling, uses_rope, with_scaling
from lengthwise.runs import Run


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its tokenizer; `length` is the training length, as far as the model tells."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def length(self) -> int | None:
        """The training length."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> str:
        """The same for tokenizers that are the same."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        found = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(found.encode()).hexdigest()[:16]


def load_subject(
    source: str | Path, *, name: str | None = None, device: str = "auto", dtype: torch.dtype = torch.float32
) -> Subject:
    """A run's final model, a checkpoint folder, or a name on the hub."""
    import lengthwise.model  # registers our models with the Auto classes

    assert lengthwise.model
    folder = Run(source).final if Run.is_run(source) else source
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        with _bars_on_terminals_only():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except OptionError as error:
        raise OptionError(f"{str(source)!r} could not be loaded: {error}") from error
    except (OSError, ValueError) as error:
        raise OSError(
            f"{str(source)!r} must be a run, a folder with a causal language model and its tokenizer, or a name on the "
            f"hub; it could not be loaded: {str(error).splitlines()[0]} Check the path."
        ) from error
    return Subject(name or Path(source).resolve().name, model.to(place).eval(), tokenizer)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """transformers draws its progress bars into log files too."""
    hide = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


def scaled_subjects(subject: Subject, scalings: Sequence[Scaling]) -> list[Subject]:
    """The subject itself and, where it has RoPE, the same with each scaling."""
    found = [subject]
    if uses_rope(subject.model):
        for scaling in scalings:
            rule = parse_scaling(scaling)
            factor = rule.get("factor")
            name = f"{subject.name}+{rule['type']}" + (f"{factor:g}" if isinstance(factor, float | int) else "")
            found.append(Subject(name, with_scaling(subject.model, scaling), subject.tokenizer))
    return found


def check_names(names: Sequence[str]) -> None:
    """An error if there are none, or if two are the same."""
    if not names:
        raise ValueError("there must be a run or checkpoint to measure; none came. Name its folder.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"names must differ; {', '.join(map(repr, twice))} came more than once. Use NAME=FOLDER to rename one."
        )
