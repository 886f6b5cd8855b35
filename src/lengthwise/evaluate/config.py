"""What is measured of every model. torch is not loaded here: the command line is made from these fields."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lengthwise.options import option

Protocol = Literal["fair", "paper", "sliding"]
PROTOCOLS: tuple[Protocol, ...] = ("fair", "paper", "sliding")
LENGTHS = (128, 256, 512, 1024)
FAR_TASKS = ("passkey", "recall")
"""Tasks whose answer stands far back."""


@dataclass(frozen=True)
class EvalConfig:
    """The options of a measurement; None leaves the choice to `evaluate` or to the study."""

    lengths: list[int] | None = option(  # noqa: RUF009
        None, "context lengths in tokens; 128, 256, 512 and 1024, or in a study 1, 2, 4, 8 and 16 times --length"
    )
    protocol: Protocol = option(  # noqa: RUF009
        "fair", "fair: the same tokens at every length; paper: consecutive windows; sliding: every token once"
    )
    text: str | None = option(None, "the source whose held-out text is used; stdlib, or in a study that of --data")
    windows: int | None = option(
        None, "at most so many text windows at each length (fair: scored spans of the text); 256, or in a study 128"
    )
    stride: int | None = option(
        None, "tokens scored in a span (fair: the shortest length) or in a window (sliding: half of the length)"
    )
    chunk: int | None = option(
        None, "read windows in chunks of so many tokens through the cache; by default only where memory needs it"
    )
    by_position: bool = option(False, "also the loss per position in the longest windows, not only of scored tokens")
    stretch: list[str] = option(  # noqa: RUF009
        [], "context-extension methods for RoPE models, such as yarn:8; a sliding window is added as control"
    )
    tasks: list[str] = option(  # noqa: RUF009
        [], "synthetic tasks to score at every length, e.g. copy; with --stretch passkey and recall"
    )
    examples: int | None = option(None, "examples of each task, length and depth; 100, or with --stretch 10")
    retrieval: bool = option(
        False, "find documents by queries at every length: nDCG@10, recall and MRR, with BM25 beside"
    )
    retrieval_set: str = option(
        "stdlib", "stdlib, or a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv as BEIR's"
    )

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of these options that are not at their defaults, as they are written."""
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != getattr(EvalConfig(), name)]

    def resolved(
        self, *, lengths: list[int] | None = None, text: str = "stdlib", windows: int = 256
    ) -> "ResolvedEvalConfig":
        """The same with these values where an option was left open."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen = {
            "lengths": list(lengths or LENGTHS),
            "text": text,
            "windows": windows,
            "examples": 10 if self.stretch else 100,
        }
        # A window alone does no harm to perplexity: what a stretched model is worth shows where far text is needed.
        given["tasks"] = self.tasks or ([*FAR_TASKS] if self.stretch else [])
        if self.examples is not None and not given["tasks"]:
            raise ValueError(f"--examples is for --tasks, got {self.examples} without; give e.g. --tasks copy")
        return ResolvedEvalConfig(**(given | {k: v if given[k] is None else given[k] for k, v in chosen.items()}))


@dataclass(frozen=True, kw_only=True)
class ResolvedEvalConfig(EvalConfig):
    """A config with no option left open, checked before a model is loaded or trained."""

    lengths: list[int]
    text: str
    windows: int
    examples: int

    def __post_init__(self) -> None:
        from lengthwise.errors import check_int

        if not self.lengths:
            raise ValueError("there must be a length to measure at, got none; give e.g. --lengths 128 256 512")
        for name in ("windows", "examples", "stride", "chunk"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        for length in self.lengths:
            check_int("length", length)
        if self.stride is not None and self.protocol == "paper":
            raise ValueError(
                f"--stride is for --protocol fair and sliding, got {self.stride} with --protocol paper, which scores "
                "every token of a window; leave it out"
            )
        if self.retrieval_set != "stdlib" and not self.retrieval:
            raise ValueError(f"--retrieval-set must be with --retrieval, got {self.retrieval_set!r} alone")
