"""What a study compares: encodings x seeds, trained alike, measured at several lengths.

What is left as None comes from the preset's recipe, as in training. torch is not loaded here: the command line is made
from these fields.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

ENCODINGS = ("cable", "kerple", "alibi", "fire", "t5-clamped", "rope", "sinusoidal", "none")
"""Those of the CABLE paper that have no end, and none at all."""


def _option(default: Any, text: str) -> Any:
    """A field with the line that --help says of it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class StudyConfig:
    """A study."""

    out: str = _option("study", "the study's folder")
    title: str = _option("Positional encodings beyond their training length", "the heading of the report")
    encodings: list[str] = field(
        default_factory=lambda: list(ENCODINGS), metadata={"help": "the encodings that are compared"}
    )
    encoding_options: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"help": 'by encoding: {"sinusoidal": {"amplitude": 0.1}}'}
    )
    seeds: list[int] = field(
        default_factory=lambda: [1337], metadata={"help": "each encoding is trained once with each"}
    )
    preset: str = _option("nano", "the size: nano, tiny, small, medium or large")
    sizes: dict[str, Any] | None = field(default=None, metadata={"help": 'other than the preset: {"n_layer": 2}'})
    data: str = _option("stdlib", "what is trained on, as in training")
    tokenizer: str | None = _option(None, "as in training")
    length: int | None = _option(None, "the training length")
    batch_tokens: int | None = _option(None, "tokens in a step")
    micro_batch: int | None = _option(None, "sequences that a process works on at a time")
    steps: int | None = _option(None, "steps of each run")
    learning_rate: float | None = _option(None, "its highest value")
    final_learning_rate: float | None = _option(None, "its value at the end")
    warmup: int | None = _option(None, "steps until the highest value")
    device: str = _option("auto", "cpu, cuda, or auto")
    jobs: int | None = _option(None, "runs that train at the same time; on the CPU one per core, else one")
    lengths: list[int] | None = field(
        default=None, metadata={"help": "measured at; 1, 2, 4, 8 and 16 times the training length"}
    )
    protocol: Literal["fair", "paper", "sliding"] = field(default="fair", metadata={"help": "which tokens are scored"})
    text: str | None = _option(None, "the source whose held-out text is used; that of --data")
    windows: int = _option(64, "windows at most, at each length")
    stride: int | None = _option(None, "tokens scored in a window")
    rope: list[str] = field(
        default_factory=list, metadata={"help": "RoPE scalings to compare as rows of their own, as yarn:8"}
    )
    tasks: list[str] = field(default_factory=list, metadata={"help": "synthetic tasks to score as well"})
    paper: str | None = _option(None, "the paper's table to print beside, e.g. fineweb-edu-medium")
    train: bool = _option(True, "train what is missing; with --no_train only gather what is there")
