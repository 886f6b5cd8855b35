"""Tasks by length: how often a model gives the whole answer, and how many of its tokens are right.

The answer that a model decodes greedily is right as a whole if and only if each of its tokens is the likeliest one
after the right ones before it; so one pass over prompt and answer is enough, and nothing is generated.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lengthwise.data.tokenizers import encode
from lengthwise.encodings import PositionError
from lengthwise.evaluate.losses import fitting_chunk, last_logits
from lengthwise.evaluate.statistics import Interval
from lengthwise.model.families import check_length
from lengthwise.tasks import Example, examples, find_task

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
BATCH_TOKENS = 8192
"""Tokens in a batch of examples."""


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
        n, z = self.examples, 1.96
        if not n:
            return Interval(math.nan, math.nan)
        middle, spread = (
            self.share + z * z / (2 * n),
            z * math.sqrt(self.share * (1 - self.share) / n + (z / n) ** 2 / 4),
        )
        return Interval(*((middle + side * spread) / (1 + z * z / n) for side in (-1, 1)))

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
) -> list[TaskScore]:
    """One score per length, and per depth where the task has one; for a length that cannot be, the reason."""
    scores, least = [], find_task(task).least
    for length in sorted(set(lengths)):
        for depth in DEPTHS if find_task(task).has_depth else (None,):
            if length < least:
                refused = f"{task} has no example of {length} characters, the shortest has {least}"
                scores.append(TaskScore(name, task, length, depth, 0, 0, math.nan, refused))
                continue
            drawn = examples(task, length=length, count=count, seed=seed, depth=depth)
            try:
                right = _right(model, tokenizer, drawn)
            except (PositionError, MemoryError) as error:
                scores.append(TaskScore(name, task, length, depth, 0, 0, math.nan, str(error)))
                continue
            tokens = sum(int(row.sum()) for row in right) / sum(len(row) for row in right)
            scores.append(TaskScore(name, task, length, depth, count, sum(bool(row.all()) for row in right), tokens))
    return scores


@torch.no_grad()
def _right(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drawn: Sequence[Example]) -> list[Tensor]:
    """For each example, whether each token of its answer is the likeliest; examples of a size go together."""
    model.eval()
    alike: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    border = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for example in drawn:
        prompt, answer = (
            encode(tokenizer, part, add_special_tokens=False) for part in (example.prompt, example.answer)
        )
        alike[len(border) + len(prompt) + len(answer), len(answer)].append([*border, *prompt, *answer])
    right: list[Tensor] = []
    for (total, scored), rows in alike.items():
        check_length(model, total - 1)
        if fitting_chunk(model, length=total, scored=scored) is not None:
            raise MemoryError(f"examples of {total:,} tokens must fit in memory whole; leave out that length")
        at_once = max(1, BATCH_TOKENS // total)
        for first in range(0, len(rows), at_once):
            batch = torch.tensor(rows[first : first + at_once], device=model.device)
            likeliest = last_logits(model, batch[:, :-1], scored).argmax(-1)
            right += list((likeliest == batch[:, -scored:]).cpu())
    return right


def task_rows(scores: Sequence[TaskScore]) -> list[list[str]]:
    """A heading and a line per model, task and depth: the share of right answers by length."""
    lengths = sorted({score.length for score in scores})
    lines: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for score in scores:
        depth = "" if score.depth is None else f"{score.depth:.0%}"
        lines[score.task, depth, score.name][score.length] = "-" if score.refused else f"{score.share:.0%}"
    head = ["task", "depth", "model", *(f"{length:,}" for length in lengths)]
    return [head, *([*line, *(cells.get(n, "-") for n in lengths)] for line, cells in lines.items())]
