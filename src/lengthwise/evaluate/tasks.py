"""Tasks by length: how often a model gives the whole answer, and how many of its tokens are right.

The answer that a model decodes greedily is right as a whole if and only if each of its tokens is the likeliest one
after the right ones before it; so one pass over prompt and answer is enough, and nothing is generated.

A length is one in the model's own tokens, which an example never exceeds.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lengthwise.data.tokenizers import encode_with_offsets, start_token
from lengthwise.encodings import PositionError
from lengthwise.evaluate.losses import last_logits
from lengthwise.evaluate.memory import bytes_needed, fitting_batch, memory_budget
from lengthwise.evaluate.progress import Progress, work
from lengthwise.evaluate.statistics import Interval, wilson
from lengthwise.model.families import check_length
from lengthwise.tasks import Example, examples, find_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TaskScore:
    """One model on one task at one length, and at one depth if the task has it."""

    name: str
    task: str
    length: int
    depth: float | None
    examples: int
    exact: int
    """Examples whose whole answer is right."""
    tokens: float
    """The share of answers' tokens that are right, given the right ones before."""
    refused: str | None = None

    @property
    def share(self) -> float:
        """The share of examples that are right."""
        return self.exact / self.examples if self.examples else math.nan

    @property
    def interval(self) -> Interval:
        """Wilson's 95 % interval of the share."""
        return wilson(self.exact, self.examples)

    def as_json(self) -> dict[str, Any]:
        """Its fields, the share and its interval."""
        return asdict(self) | ({} if self.refused else {"share": self.share, "interval": list(self.interval)})


def score_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    lengths: Sequence[int],
    *,
    name: str,
    count: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[TaskScore]:
    """One score per length, and per depth where the task has one; for a length that cannot be, the reason."""
    if progress is None:
        with Progress(task_work([task], lengths, count)) as own:
            return score_task(model, tokenizer, task, lengths, name=name, count=count, seed=seed, progress=own)
    scores: list[TaskScore] = []
    for length in sorted(set(lengths)):
        progress.start(f"{name}, {task} at {length:,}")
        for depth in _depths(task):
            try:
                drawn = sized_examples(tokenizer, task, length=length, count=count, seed=seed, depth=depth)
                right = _right(model, tokenizer, drawn)
            except (NoExampleError, PositionError, MemoryError) as error:
                scores.append(TaskScore(name, task, length, depth, 0, 0, math.nan, str(error)))
            else:
                tokens = sum(int(row.sum()) for row in right) / sum(len(row) for row in right)
                exact = sum(bool(row.all()) for row in right)
                scores.append(TaskScore(name, task, length, depth, count, exact, tokens))
            progress.done(length, count)
    return scores


def task_work(tasks: Sequence[str], lengths: Sequence[int], count: int) -> float:
    """What scoring these tasks takes, for the time left."""
    return sum(work(length, count) * len(_depths(task)) for task in tasks for length in set(lengths))


def _depths(task: str) -> tuple[float | None, ...]:
    return DEPTHS if find_task(task).has_depth else (None,)


class NoExampleError(ValueError):
    """A task has no example as short as that."""


class Row(NamedTuple):
    """An example in tokens, the last `scored` of which are its answer."""

    tokens: list[int]
    scored: int


def _tokenized(tokenizer: PreTrainedTokenizerBase, example: Example) -> Row:
    """Prompt and answer as one text: how a token is cut at their border is not for us to say."""
    ids, offsets = encode_with_offsets(tokenizer, example.prompt + example.answer)
    return Row(ids, sum(end > len(example.prompt) for _, end in offsets))


def sized_examples(
    tokenizer: PreTrainedTokenizerBase, task: str, *, length: int, count: int, seed: int = 0, depth: float | None = None
) -> list[Row]:
    """Examples of nearly `length` tokens and never more; an error if the task has none so short."""
    least = find_task(task).least

    def draw(characters: int) -> tuple[list[Row], int, int]:
        """Rows, and how many characters and tokens the longest has."""
        drawn = examples(task, length=characters, count=count, seed=seed, depth=depth)
        rows = [_tokenized(tokenizer, example) for example in drawn]
        return rows, max(len(e.prompt) + len(e.answer) for e in drawn), max(len(row.tokens) for row in rows)

    # A first draw says how many characters a token has; it is enough where a token is a character.
    characters = max(length, least)
    rows, text, longest = draw(characters)
    if text > longest:
        characters = max(least, int(0.99 * length * (text / longest)))
        rows, _, longest = draw(characters)
    while longest > length:
        characters = min(characters - 1, int(characters * length / longest))
        if characters < least:
            raise NoExampleError(f"{task} has no example of {length:,} tokens, the shortest has {least} characters")
        rows, _, longest = draw(characters)
    return rows


@torch.no_grad()
def _right(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drawn: Sequence[Row]) -> list[Tensor]:
    """For each example, whether each token of its answer is the likeliest; examples of a size go together."""
    model.eval()
    alike: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    first = start_token(tokenizer)
    first = tokenizer.eos_token_id if first is None else first
    border = [] if first is None else [int(first)]
    for row in drawn:
        alike[len(border) + len(row.tokens), row.scored].append([*border, *row.tokens])
    right: list[Tensor] = []
    for (total, scored), rows in alike.items():
        check_length(model, total - 1)
        if bytes_needed(model, length=total, scored=scored, whole_logits=True) > memory_budget(model):
            raise MemoryError(f"examples of {total:,} tokens must fit in memory whole; leave out that length")
        at_once = fitting_batch(model, length=total, scored=scored, whole_logits=True)
        for first in range(0, len(rows), at_once):
            batch = torch.tensor(rows[first : first + at_once], device=model.device)
            likeliest = last_logits(model, batch[:, :-1], scored).argmax(-1)
            right += list((likeliest == batch[:, -scored:]).cpu())
    return right


def task_share(scores: Sequence[TaskScore], *, name: str, task: str, length: int) -> tuple[float, Interval] | None:
    """The share of right answers over all depths, with its interval; None if there is none."""
    own = [s for s in scores if (s.name, s.task, s.length) == (name, task, length) and not s.refused]
    exact, count = sum(score.exact for score in own), sum(score.examples for score in own)
    return (exact / count, wilson(exact, count)) if count else None


def depth_figure(scores: Sequence[TaskScore]) -> "Figure":
    """The share of right answers by length and depth: a panel for every task and model."""
    from lengthwise.views.heat_map import HeatMap, heat_maps_figure  # late: matplotlib is not needed for a table

    deep = [score for score in scores if score.depth is not None]
    panels = []
    for task, name in dict.fromkeys((score.task, score.name) for score in deep):
        own = {
            (s.length, s.depth): math.nan if s.refused else s.share for s in deep if (s.task, s.name) == (task, name)
        }
        lengths = sorted({length for length, _ in own})
        values = [[own.get((length, depth), math.nan) for length in lengths] for depth in DEPTHS]
        columns, rows = [f"{length:,}" for length in lengths], [f"{depth:.0%}" for depth in DEPTHS]
        panels.append(HeatMap(f"{task}: {name}", columns, rows, values))
    return heat_maps_figure(
        panels,
        title="Share of right answers by length and by where in it the answer stands",
        across="length in tokens",
        up="depth",
    )


def task_rows(scores: Sequence[TaskScore]) -> list[list[str]]:
    """A heading and a line per model, task and depth: the share of right answers by length."""
    lengths = sorted({score.length for score in scores})
    lines: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for score in scores:
        depth = "" if score.depth is None else f"{score.depth:.0%}"
        lines[score.task, depth, score.name][score.length] = "-" if score.refused else f"{score.share:.0%}"
    head = ["task", "depth", "model", *(f"{length:,}" for length in lengths)]
    return [head, *([*line, *(cells.get(n, "-") for n in lengths)] for line, cells in lines.items())]


def task_notes(scores: Sequence[TaskScore]) -> list[str]:
    """The reason for each missing cell, once for all models and depths that have it."""
    names: dict[tuple[str, int, str], dict[str, None]] = defaultdict(dict)
    for score in scores:
        if score.refused:
            names[score.task, score.length, score.refused][score.name] = None
    return [f"{task} at {length:,} of {', '.join(own)}: {reason}" for (task, length, reason), own in names.items()]
