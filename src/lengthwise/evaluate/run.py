"""A whole evaluation: several models, all lengths and tasks, and the files with the results.

RoPE's scalings can be switched on for it: the same weights, other angles, for our models and transformers'. A scaling
is written TYPE:FACTOR, as in "yarn:8", or is a mapping with all parameters of its rule.
"""

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lengthwise.data import documents
from lengthwise.encodings.registry import is_encoding
from lengthwise.evaluate.config import EvalConfig, ResolvedEvalConfig
from lengthwise.evaluate.corpus import Corpus, read_corpus
from lengthwise.evaluate.losses import Score, score_lengths
from lengthwise.evaluate.masked import score_masked_lengths
from lengthwise.evaluate.table import LengthTable, aligned, length_figure, position_figure
from lengthwise.evaluate.tasks import TaskScore, score_task, task_rows
from lengthwise.files import write_atomic
from lengthwise.loading import LoadedModel, LoadError, load_model, tokenizer_id
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.runs import Run
from lengthwise.tasks import find_task

log = logging.getLogger(__name__)
CORPUS_TOKENS = 2**20
"""Tokens read of a text, unless the windows need more."""
Scaling = str | Mapping[str, object]


@dataclass(frozen=True)
class Evaluation:
    """The table, the scores of tasks, and the training length if all models have the same."""

    table: LengthTable
    tasks: list[TaskScore]
    train_length: int | None

    def text(self) -> str:
        """For a terminal."""
        return self.table.text() + (f"\n\n{aligned(task_rows(self.tasks))}" if self.tasks else "")

    def write(self, folder: Path) -> list[Path]:
        """JSON, CSV, Markdown, LaTeX and the figures; a figure that cannot be drawn is logged and left out."""
        texts = {
            "scores.json": self.table.json(),
            "scores.csv": self.table.csv(),
            "scores.md": self.table.markdown(),
            "scores.tex": self.table.latex(),
        }
        if self.tasks:
            texts["tasks.json"] = json.dumps([score.as_json() for score in self.tasks], indent=1)
        written = [write_atomic(folder / name, content.rstrip("\n") + "\n") for name, content in texts.items()]
        return [*written, *self._draw(folder)]

    def _draw(self, folder: Path) -> Iterator[Path]:
        from lengthwise.views.style import save_picture

        for name in ("lengths.png", "positions.png"):
            try:
                if name == "lengths.png":
                    picture = length_figure(self.table, train_length=self.train_length)
                else:
                    picture = position_figure(self.table, self.table.lengths[-1], train_length=self.train_length)
                yield save_picture(picture, folder / name, force=True)
            except (ArithmeticError, ImportError, LookupError, RuntimeError, ValueError) as error:
                log.warning("%s could not be drawn: %s", name, error)


def evaluate_models(
    sources: Sequence[str], config: EvalConfig, *, device: str = "auto", trust_remote_code: bool = False
) -> Evaluation:
    """Load, measure and compare runs, checkpoint folders and names on the hub; NAME=SOURCE gives one a name."""
    resolved = config.resolved()
    named = split_names(sources)
    for task in resolved.tasks:
        find_task(task)
    scalings = [parse_scaling(scaling) for scaling in resolved.rope]
    corpora = Corpora(resolved)
    scores: list[Score] = []
    tasks: list[TaskScore] = []
    train_lengths = set()
    for name, source in named:
        loaded = load_for_evaluation(source, name=name, device=device, trust_remote_code=trust_remote_code)
        train_lengths.add(loaded.train_length)
        scores += score_model(loaded, resolved, corpora, scalings=scalings)
        tasks += score_tasks(loaded, resolved)
    return Evaluation(LengthTable(scores), tasks, train_lengths.pop() if len(train_lengths) == 1 else None)


def load_for_evaluation(
    source: str | Path, *, name: str, device: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """A trained causal language model in float32 with its tokenizer; an error for anything else."""
    expected = "expected a trained causal language model with its tokenizer"
    if is_encoding(str(source)):
        raise LoadError(f"{expected}, got the encoding {str(source)!r}; name a run or a folder, such as ./{source}")
    loaded = load_model(source, name=name, device=device, dtype=torch.float32, trust_remote_code=trust_remote_code)
    if loaded.tokenizer is None:
        raise LoadError(f"{expected}, got {str(source)!r}, which has no tokenizer; save one with save_pretrained")
    if loaded.model.config.is_encoder_decoder or loaded.model.get_output_embeddings() is None:
        raise LoadError(
            f"{expected}, got {type(loaded.model).__name__}, which has no head that predicts the next token"
        )
    if is_masked_model(loaded.model):
        if loaded.tokenizer.mask_token_id is None:
            raise LoadError(f"masked tokens need a mask token, got the tokenizer of {str(source)!r} without one")
        return loaded
    if not isinstance(loaded.model, LengthwiseForCausalLM) and not _is_causal(loaded):
        raise LoadError(f"{expected}, got {type(loaded.model).__name__}, which sees tokens before it predicts them")
    return loaded


def is_masked_model(model: PreTrainedModel) -> bool:
    """Whether it predicts masked tokens."""
    return type(model).__name__.endswith("ForMaskedLM")


@torch.no_grad()
def _is_causal(loaded: LoadedModel) -> bool:
    """Whether another last token leaves the logits before it as they are: encoders have causal heads too."""
    ids = torch.arange(2, 10, device=loaded.model.device).repeat(2, 1)
    ids[1, -1] += 1
    first, second = loaded.model(ids).logits[:, :-1].float()
    return torch.allclose(first, second, rtol=1e-3, atol=1e-3 * first.abs().max().item(), equal_nan=True)


class Corpora:
    """The text of an evaluation, tokenised once for each tokenizer."""

    def __init__(self, config: ResolvedEvalConfig) -> None:
        self.config = config
        self._by_tokenizer: dict[str, Corpus] = {}

    def read(self, tokenizer: PreTrainedTokenizerBase) -> Corpus:
        """As much of the held-out text as the windows can use."""
        key = tokenizer_id(tokenizer)
        if key not in self._by_tokenizer:
            text, limit = self.config.text, max(CORPUS_TOKENS, self.config.windows * max(self.config.lengths) + 1)
            self._by_tokenizer[key] = read_corpus(documents(text, "held-out"), tokenizer, source=text, limit=limit)
        return self._by_tokenizer[key]


def score_model(
    loaded: LoadedModel, config: ResolvedEvalConfig, corpora: Corpora, *, scalings: Sequence[Scaling]
) -> list[Score]:
    """The model at every length, and again under every scaling of its RoPE."""
    assert loaded.tokenizer is not None
    corpus = corpora.read(loaded.tokenizer)
    if loaded.tokenizer.mask_token_id is not None and is_masked_model(loaded.model):
        return score_masked_lengths(
            loaded.model,
            corpus,
            config.lengths,
            mask=loaded.tokenizer.mask_token_id,
            name=loaded.name,
            tokenizer=loaded.vocabulary,
            windows=config.windows,
        )
    return [
        score
        for variant in [loaded, *_scaled(loaded, scalings)]
        for score in score_lengths(
            variant.model,
            corpus,
            config.lengths,
            name=variant.name,
            tokenizer=loaded.vocabulary,
            protocol=config.protocol,
            windows=config.windows,
            stride=config.stride,
            chunk=config.chunk,
        )
    ]


def score_tasks(loaded: LoadedModel, config: ResolvedEvalConfig) -> list[TaskScore]:
    """The model on every task at every length."""
    assert loaded.tokenizer is not None
    if config.tasks and is_masked_model(loaded.model):
        raise LoadError(f"tasks are for models that predict the next token, got {loaded.name}, an encoder")
    return [
        score
        for task in config.tasks
        for score in score_task(
            loaded.model, loaded.tokenizer, task, config.lengths, name=loaded.name, count=config.examples
        )
    ]


def _scaled(loaded: LoadedModel, scalings: Sequence[Scaling]) -> Iterator[LoadedModel]:
    """The model with each scaling, if it has RoPE: NAME+yarn8."""
    for rule in map(parse_scaling, scalings if uses_rope(loaded.model) else ()):
        factor = rule.get("factor")
        name = f"{loaded.name}+{rule['type']}" + (f"{factor:g}" if isinstance(factor, float | int) else "")
        yield replace(loaded, name=name, model=with_scaling(loaded.model, rule))


def split_names(sources: Sequence[str]) -> list[tuple[str, str]]:
    """The name of each model and its source, from NAME=SOURCE or the source alone; an error if names are alike."""
    named = [_split_name(source) for source in sources]
    _check_names([name for name, _ in named])
    return named


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("expected a run, a checkpoint folder or a name on the hub to evaluate, got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"names must differ, got {', '.join(map(repr, twice))} twice; use NAME=FOLDER to rename one")


def _split_name(source: str) -> tuple[str, str]:
    name, sign, path = source.partition("=")
    if sign and not Path(source).exists():
        return name, path
    return (Run(source).name if Run.is_run(source) else Path(source).name), source


def parse_scaling(scaling: Scaling) -> dict[str, object]:
    """The mapping that a scaling stands for.

    >>> parse_scaling("yarn:8")
    {'type': 'yarn', 'factor': 8.0}
    """
    if not isinstance(scaling, str):
        return dict(scaling)
    kind, _, factor = scaling.partition(":")
    try:
        return {"type": kind, "factor": float(factor)}
    except ValueError:
        raise ValueError(f"a scaling must be TYPE:FACTOR, such as 'yarn:8', got {scaling!r}") from None


def uses_rope(model: PreTrainedModel) -> bool:
    """Whether positions enter by rotation, so that a scaling means something."""
    if isinstance(model, LengthwiseForCausalLM):
        return any(name == "rope" for spec in model.config.schedule for name, _ in spec.parts())
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))


def with_scaling(model: PreTrainedModel, scaling: Scaling) -> PreTrainedModel:
    """The same model, sharing its weights, with its angles stretched."""
    if not uses_rope(model):
        raise ValueError(f"a scaling stretches RoPE's angles, and {type(model).__name__} has none")
    rule = parse_scaling(scaling)
    config: Any = copy.deepcopy(model.config)
    if isinstance(model, LengthwiseForCausalLM):
        config.with_options("rope", scaling=rule)
    else:
        text = config.get_text_config()
        parameters = {key: value for key, value in rule.items() if key != "type"}
        length = text.max_position_embeddings
        text.rope_parameters = {
            "rope_theta": text.rope_parameters["rope_theta"],
            "rope_type": rule["type"],
            "original_max_position_embeddings": length,
            **{k: v for k, v in text.rope_parameters.items() if k == "partial_rotary_factor"},
            **parameters,
        }
    config._attn_implementation = model.config._attn_implementation
    with torch.device(model.device):
        scaled = type(model)(config)
    scaled.load_state_dict(model.state_dict(), assign=True)
    scaled.tie_weights()
    return scaled.eval()
