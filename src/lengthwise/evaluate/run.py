"""A whole evaluation: several models, all lengths and tasks, and the files with the results.

A model with RoPE can be stretched for it in several ways, each a row of its own: the same weights, other distances.
Then there is always a control, a plain window of the trained length, with which every row is compared on the same
tokens, a value at the trained length, and tasks whose answer stands far back: a window alone does perplexity no harm.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lengthwise.data import Split, documents
from lengthwise.data.tokenizers import surrounding_tokens
from lengthwise.encodings.registry import is_encoding
from lengthwise.errors import OptionError
from lengthwise.evaluate.config import EvalConfig, ResolvedEvalConfig
from lengthwise.evaluate.corpus import Corpus, read_corpus
from lengthwise.evaluate.losses import NO_POSITIONS, LengthPlan, plan_lengths, score_plans
from lengthwise.evaluate.masked import score_masked_lengths
from lengthwise.evaluate.progress import Progress
from lengthwise.evaluate.score import Score
from lengthwise.evaluate.table import (
    LengthTable,
    aligned,
    control_figure,
    format_value,
    length_figure,
    markdown,
    position_figure,
)
from lengthwise.evaluate.tasks import TaskScore, depth_figure, score_task, task_notes, task_rows, task_share, task_work
from lengthwise.files import json_text, read_stored, write_atomic
from lengthwise.loading import LoadedModel, LoadError, load_config_of, load_model, load_tokenizer_of, tokenizer_id
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.model.stretch import stretching
from lengthwise.model.stretch.bands import CONTROL
from lengthwise.model.stretch.spec import StretchSpec, parse_stretch
from lengthwise.runs import Run
from lengthwise.tasks import find_task

log = logging.getLogger(__name__)
CORPUS_TOKENS = 2**20
"""Tokens read of a text, unless the windows need more."""

CAUSAL_OPTIONS = ("protocol", "stride", "chunk", "by_position", "stretch", "tasks")
"""What changes nothing of an encoder's measurement."""

NOT_ALWAYS_WRITTEN = ("tasks.json", "lengths.png", "positions.png", "control.png", "tasks.png")
"""Files that an evaluation has only where its options ask for them, and where they can be drawn."""

MASKED = "ForMaskedLM"
EXPECTED = "expected a trained causal language model with its tokenizer"


@dataclass(frozen=True)
class Evaluation:
    """The table, the scores of tasks, and the training length if all models have the same."""

    table: LengthTable
    tasks: list[TaskScore]
    train_length: int | None
    remarks: tuple[str, ...] = ()
    """What every model needed, and what was left out, in words."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """By row, with --stretch: the row of the same model that sees a window of the trained length."""

    def rows(self) -> list[list[str]]:
        """A heading and a line a model: every length with its interval, how far it holds, and more at the longest."""
        table, longest = self.table, self.table.lengths[-1]
        tasks = list(dict.fromkeys(score.task for score in self.tasks))
        head = ["model", *(f"{length:,}" for length in table.lengths), "holds to"]
        head += [f"against the control at {longest:,}"] * bool(self.controls)
        rows = [[*head, *(f"{task} at {longest:,}" for task in tasks)]]
        for name in table.names:
            cells = [_with_interval(table, name, length) for length in table.lengths]
            shares = [task_share(self.tasks, name=name, task=task, length=longest) for task in tasks]
            against = [self._against_control(name, longest)] * bool(self.controls)
            rows.append([name, *cells, self._holds(name), *against, *map(_share, shares)])
        return rows

    def _holds(self, name: str) -> str:
        held = self.table.holds(name)
        if held is None:
            return "-"
        measured = [length for length in self.table.lengths if self.table.seeds(name, length)]
        length = f"{'at least ' * (held.length == measured[-1])}{held.length:,}"
        return length if held.low == held.high else f"{length} ({held.low:,} to {held.high:,})"

    def _against_control(self, name: str, length: int) -> str:
        control = self.controls.get(name)
        if control is None or not (self.table.seeds(name, length) and self.table.seeds(control, length)):
            return "-"
        if control == name:
            return "the control"
        value, interval = self.table.difference(name, control, length)
        if self.table.metric == "perplexity":
            return f"{math.expm1(value):+.1%} ({interval.text(lambda end: f'{math.expm1(end):+.1%}')})"
        return f"{value:+.3f} ({interval.text(lambda end: f'{end:+.3f}')})"

    def notes(self) -> list[str]:
        """What the numbers are."""
        notes = [
            *self.table.notes(),
            "in brackets: 95 % intervals over documents, and over examples of tasks",
            "holds to: the longest length up to which the loss (not the perplexity) is at most 2 % above the lowest "
            "at any shorter length",
        ]
        if self.controls:
            notes.append("against the control: on the same tokens, with the paired interval")
        if self.train_length is not None:
            notes.append(f"trained at {self.train_length:,} tokens")
        return [*notes, *task_notes(self.tasks), *self.remarks]

    def text(self) -> str:
        """For a terminal."""
        tasks = ["", aligned(task_rows(self.tasks))] if self.tasks else []
        return "\n".join([aligned(self.rows()), "", *self.notes(), *tasks])

    def markdown(self) -> str:
        """Markdown tables with the notes."""
        tasks = ["", markdown(task_rows(self.tasks))] if self.tasks else []
        return "\n".join([markdown(self.rows()), "", *(f"- {note}" for note in self.notes()), *tasks])

    def write(self, folder: Path) -> list[Path]:
        """JSON, CSV, Markdown, LaTeX and the figures; a figure that cannot be drawn is logged and left out.

        What an earlier evaluation left in the folder and this one does not have is removed: it would pass for its own.
        """
        is_another_there = "cells" in read_stored(folder / "scores.json")
        texts = {
            "scores.json": self.table.json(),
            "scores.csv": self.table.csv(),
            "scores.md": self.markdown(),
            "scores.tex": self.table.latex(),
        }
        if self.tasks:
            texts["tasks.json"] = json_text([score.as_json() for score in self.tasks])
        written = [write_atomic(folder / name, content.rstrip("\n") + "\n") for name, content in texts.items()]
        written += self._draw(folder)
        for path in (folder / name for name in NOT_ALWAYS_WRITTEN):
            if is_another_there and path.is_file() and path not in written:
                path.unlink()
                log.info("removed %s, of an earlier evaluation", path)
        return written

    def _draw(self, folder: Path) -> Iterator[Path]:
        from lengthwise.views.style import save_picture

        names = ["lengths.png"]
        names += ["positions.png"] if any(score.positions for score in self.table.scores) else []
        names += ["control.png"] if self.controls else []
        names += ["tasks.png"] if any(score.depth is not None for score in self.tasks) else []
        for name in names:
            try:
                if name == "lengths.png":
                    picture = length_figure(self.table, train_length=self.train_length)
                elif name == "control.png":
                    picture = control_figure(self.table, self.controls, train_length=self.train_length)
                elif name == "tasks.png":
                    picture = depth_figure(self.tasks)
                else:
                    picture = position_figure(self.table, self.table.lengths[-1], train_length=self.train_length)
                yield save_picture(picture, folder / name, force=True)
            except (ArithmeticError, ImportError, LookupError, RuntimeError, ValueError) as error:
                log.warning("%s could not be drawn: %s", name, error)


def _with_interval(table: LengthTable, name: str, length: int) -> str:
    cell = table.cell(name, length)
    if cell.refused:
        return "-"
    return f"{cell} ({cell.interval.text(format_value)})"


def _share(share: tuple[float, tuple[float, float]] | None) -> str:
    return "-" if share is None else f"{share[0]:.0%} ({share[1][0]:.0%} to {share[1][1]:.0%})"


def evaluate_models(
    sources: Sequence[str], config: EvalConfig, *, device: str = "auto", trust_remote_code: bool = False
) -> Evaluation:
    """Load, measure and compare runs, checkpoint folders and names on the hub; NAME=SOURCE gives one a name."""
    resolved = config.resolved()
    named = split_names(sources)
    for task in resolved.tasks:
        find_task(task)
    specs = [parse_stretch(spec) for spec in resolved.stretch]
    _check_sources(named, resolved, specs, trust_remote_code=trust_remote_code)
    corpora = Corpora(resolved, _unseen_split(named, resolved.text))
    scores: list[Score] = []
    tasks: list[TaskScore] = []
    remarks: list[str] = []
    controls: dict[str, str] = {}
    train_lengths = set()
    for name, source in named:
        loaded = load_for_evaluation(source, name=name, device=device, trust_remote_code=trust_remote_code)
        train_lengths.add(loaded.train_length)
        measurement = Measurement(loaded, resolved, corpora, specs)
        remarks += [measurement.memory(), *measurement.left_out]
        log.info("%s", measurement.memory())
        controls |= measurement.controls()
        own_scores, own_tasks = measurement.run()
        scores += own_scores
        tasks += own_tasks
    train_length = train_lengths.pop() if len(train_lengths) == 1 else None
    return Evaluation(LengthTable(scores), tasks, train_length, tuple(remarks), controls)


def _check_sources(
    named: Sequence[tuple[str, str]],
    config: ResolvedEvalConfig,
    specs: Sequence[StretchSpec],
    *,
    trust_remote_code: bool,
) -> None:
    """What can be known without weights, of all models: an error at the last one would lose what was measured."""
    lengths: list[int] = []
    for name, source in named:
        _refuse_encoding(source)
        own = load_config_of(source, trust_remote_code=trust_remote_code)
        _refuse_no_tokenizer(source, load_tokenizer_of(source, trust_remote_code=trust_remote_code))
        if any(architecture.endswith(MASKED) for architecture in own.architectures or ()):
            _refuse_causal_options(name, config)
        length = getattr(own.get_text_config(), "max_position_embeddings", None)
        lengths += [] if length is None else [length]
    for spec in specs:
        refusals = [error for length in lengths if (error := _refusal_of_numbers(spec, length)) is not None]
        # Where they fit one model, the others are measured without that way.
        if refusals and len(refusals) == len(lengths):
            raise refusals[0]


def _unseen_split(named: Sequence[tuple[str, str]], text: str) -> Split:
    """The part of the text that no run was trained on; an error where one was trained on all of it."""
    configs = {name: Run(source).config for name, source in named if Run.is_run(source)}
    split: Split = "held-out"
    for name, config in configs.items():
        if (other := config.get("held_out")) is None:
            continue
        if _is_same(text, config.get("data", "stdlib")):
            raise LoadError(
                f"--text must be text that {name} was not trained on, got {text!r}, all of which it was; "
                f"give --text {other}, which was held out"
            )
        # As in `load_model`: data that was named as held out is so as a whole, unless another run was trained on it.
        if _is_same(text, other) and not any(_is_same(text, own.get("data", "stdlib")) for own in configs.values()):
            split = "all"
    return split


def _is_same(source: str, other: str) -> bool:
    return Path(source).resolve() == Path(other).resolve()


def _refusal_of_numbers(spec: StretchSpec, train_length: int) -> OptionError | None:
    try:
        spec.bands(train_length)
    except OptionError as error:
        return error
    return None


def load_for_evaluation(
    source: str | Path, *, name: str, device: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """A trained causal language model in float32 with its tokenizer; an error for anything else."""
    _refuse_encoding(source)
    loaded = load_model(source, name=name, device=device, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tokenizer = _refuse_no_tokenizer(source, loaded.tokenizer)
    if loaded.model.config.is_encoder_decoder or loaded.model.get_output_embeddings() is None:
        raise LoadError(
            f"{EXPECTED}, got {type(loaded.model).__name__}, which has no head that predicts a token; "
            "one that gives vectors is measured with --retrieval"
        )
    if is_masked_model(loaded.model):
        if tokenizer.mask_token_id is None:
            raise LoadError(f"masked tokens need a mask token, got the tokenizer of {str(source)!r} without one")
        return loaded
    if not isinstance(loaded.model, LengthwiseForCausalLM) and not _is_causal(loaded):
        raise LoadError(f"{EXPECTED}, got {type(loaded.model).__name__}, which sees tokens before it predicts them")
    return loaded


def _refuse_encoding(source: str | Path) -> None:
    if is_encoding(str(source)):
        raise LoadError(f"{EXPECTED}, got the encoding {str(source)!r}; name a run or a folder, such as ./{source}")


def _refuse_no_tokenizer(source: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise LoadError(f"{EXPECTED}, got {str(source)!r}, which has no tokenizer; save one with save_pretrained")
    return tokenizer


def _refuse_causal_options(name: str, config: EvalConfig) -> None:
    if ignored := config.changed(CAUSAL_OPTIONS):
        raise LoadError(f"{', '.join(ignored)}: for models that predict the next token, got {name}, an encoder")


def is_masked_model(model: PreTrainedModel) -> bool:
    """Whether it predicts masked tokens."""
    return type(model).__name__.endswith(MASKED)


@torch.no_grad()
def _is_causal(loaded: LoadedModel) -> bool:
    """Whether another last token leaves the logits before it as they are: encoders have causal heads too."""
    ids = torch.arange(2, 10, device=loaded.model.device).repeat(2, 1)
    ids[1, -1] += 1
    first, second = loaded.model(ids).logits[:, :-1].float()
    return torch.allclose(first, second, rtol=1e-3, atol=1e-3 * first.abs().max().item(), equal_nan=True)


class Corpora:
    """The text of an evaluation, tokenised once for each tokenizer."""

    def __init__(self, config: ResolvedEvalConfig, split: Split = "held-out") -> None:
        self.config, self.split = config, split
        self._by_tokenizer: dict[str, Corpus] = {}

    def read(self, tokenizer: PreTrainedTokenizerBase) -> Corpus:
        """As much of the held-out text as the windows can use."""
        key = tokenizer_id(tokenizer)
        if key not in self._by_tokenizer:
            text, limit = self.config.text, max(CORPUS_TOKENS, self.config.windows * max(self.config.lengths) + 1)
            self._by_tokenizer[key] = read_corpus(documents(text, self.split), tokenizer, source=text, limit=limit)
        return self._by_tokenizer[key]


class Measurement:
    """One model at every length, as it is and stretched in every way; planned and checked as it is made."""

    def __init__(
        self, loaded: LoadedModel, config: ResolvedEvalConfig, corpora: Corpora, specs: Sequence[StretchSpec] = ()
    ) -> None:
        assert loaded.tokenizer is not None
        self.loaded, self.config, self.tokenizer = loaded, config, loaded.tokenizer
        self.corpus = corpora.read(self.tokenizer)
        self.masked = is_masked_model(loaded.model)
        if self.masked:
            _refuse_causal_options(loaded.name, config)
        self.left_out: list[str] = []
        """What cannot be measured of this model, and why."""
        self.variants: dict[str, StretchSpec | None] = {loaded.name: None}
        self.variants |= {f"{loaded.name}+{spec.label}": spec for spec in self._ways(specs)}
        self.lengths = self._lengths()
        self.plans = {} if self.masked else {name: self._plans(spec) for name, spec in self.variants.items()}
        for name, plans in self.plans.items():
            if config.by_position and plans[-1].refused is None and not plans[-1].every_place:
                self.left_out.append(f"{name} without losses {NO_POSITIONS}")

    def _ways(self, specs: Sequence[StretchSpec]) -> list[StretchSpec]:
        """The control and what was given, but for those that this model refuses, which are left out with the reason."""
        if not specs:
            return []
        trained = self.loaded.train_length
        control = parse_stretch(CONTROL if trained is None else f"{CONTROL}:{trained}")
        refused: dict[str, list[str]] = {}
        possible = []
        for spec in (control, *(spec for spec in specs if spec.label not in (CONTROL, control.label))):
            try:
                with stretching(self.loaded.model, spec):
                    possible.append(spec)
            except (NotImplementedError, ValueError) as error:
                refused.setdefault(str(error), []).append(spec.label)
        for reason, labels in refused.items():
            self._leave_out(f"{self.loaded.name} without {', '.join(labels)}: {reason}")
        return possible

    def controls(self) -> dict[str, str]:
        """By variant the one that sees a window of the trained length; none without it."""
        windows = [name for name, spec in self.variants.items() if spec and spec.label.partition(":")[0] == CONTROL]
        return dict.fromkeys(self.variants, windows[0]) if windows else {}

    def _leave_out(self, remark: str) -> None:
        log.warning("%s", remark)
        self.left_out.append(remark)

    def _lengths(self) -> list[int]:
        """Those of the config, and the trained one, without which nothing can be said of longer ones."""
        trained = self.loaded.train_length
        stretched = len(self.variants) > 1 and trained is not None and trained < max(self.config.lengths)
        return sorted({*self.config.lengths, *([trained] if stretched and trained is not None else [])})

    def _plans(self, spec: StretchSpec | None) -> list[LengthPlan]:
        with stretching(self.loaded.model, spec):
            return plan_lengths(
                self.loaded.model,
                len(self.corpus),
                self.lengths,
                protocol=self.config.protocol,
                windows=self.config.windows,
                stride=self.config.stride,
                chunk=self.config.chunk,
                by_position=self.config.by_position,
            )

    def memory(self) -> str:
        """How much the longest length will take, in words."""
        model = self.loaded.model
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if self.masked:
            return f"memory of {self.loaded.name}: {_size(weights)} of weights"
        plans = [plan for plans in self.plans.values() for plan in plans if plan.refused is None]
        most = max(plans, key=lambda plan: plan.bytes, default=None)
        need = "nothing can be computed" if most is None else f"{_size(most.bytes)} at {most.length:,} tokens"
        return f"memory of {self.loaded.name}: {_size(weights)} of weights and about {need}"

    def run(self, *, tasks: bool = True) -> tuple[list[Score], list[TaskScore]]:
        """All scores; without tasks where they are not wanted of every variant."""
        model, config = self.loaded.model, self.config
        if self.masked:
            return self._masked_scores(), []
        wanted = {name: config.tasks if tasks or spec is None else [] for name, spec in self.variants.items()}
        total = sum(plan.work for plans in self.plans.values() for plan in plans)
        total += sum(task_work(own, self.lengths, config.examples) for own in wanted.values())
        scores: list[Score] = []
        task_scores: list[TaskScore] = []
        with Progress(total) as progress:
            for name, spec in self.variants.items():
                with stretching(model, spec):
                    vocabulary, plans = self.loaded.vocabulary, self.plans[name]
                    scores += score_plans(model, self.corpus, plans, name=name, tokenizer=vocabulary, progress=progress)
                    for task in wanted[name]:
                        task_scores += score_task(
                            model,
                            self.tokenizer,
                            task,
                            self.lengths,
                            name=name,
                            count=config.examples,
                            progress=progress,
                        )
        return scores, task_scores

    def _masked_scores(self) -> list[Score]:
        assert self.tokenizer.mask_token_id is not None
        return score_masked_lengths(
            self.loaded.model,
            self.corpus,
            self.lengths,
            mask=self.tokenizer.mask_token_id,
            name=self.loaded.name,
            tokenizer=self.loaded.vocabulary,
            windows=self.config.windows,
            around=surrounding_tokens(self.tokenizer),
            special=self.tokenizer.all_special_ids,
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


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
