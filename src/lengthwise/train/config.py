"""What a training run is started with: one flat dataclass, and the recipe of each preset.

What is left as None comes from the preset's recipe. Only plain values, so that a config file cannot run code. torch is
not loaded here: the command line is made from these fields.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = 1
"""The version of the config; it rises when a field changes its meaning."""

NOT_KEPT = ("out", "resume", "dry_run")
"""Where and whether, not what: not part of config.yaml, so that a run can be repeated elsewhere from it."""

MAY_CHANGE = (
    *NOT_KEPT,
    "micro_batch",
    "device",
    "compile",
    "sharded",
    "recompute",
    "checkpoint_every",
    "keep",
    "maps_every",
    "log_every",
    "tensorboard",
)
"""What a resumed run may have otherwise than it was started with: it changes no number but by rounding."""


@dataclass(frozen=True)
class Recipe:
    """How a preset is trained unless told otherwise."""

    tokenizer: str
    length: int
    batch_tokens: int
    micro_batch: int
    steps: int
    learning_rate: float
    final_learning_rate: float
    warmup: int


PAPER = Recipe(
    tokenizer="gpt2",
    length=1024,
    batch_tokens=524_288,
    micro_batch=16,
    steps=19_073,
    learning_rate=6e-4,
    final_learning_rate=6e-5,
    warmup=715,
)
"""The CABLE paper's recipe on FineWeb-Edu."""

RECIPES = {
    # For two cores: small steps, so that there are many of them in the few minutes that a run of the study has.
    "nano": Recipe(
        tokenizer="bpe:1024",
        length=128,
        batch_tokens=2_048,
        micro_batch=16,
        steps=400,
        learning_rate=3e-3,
        final_learning_rate=3e-4,
        warmup=40,
    ),
    "tiny": PAPER,
    "small": PAPER,
    "medium": dataclasses.replace(PAPER, micro_batch=8),
    "large": dataclasses.replace(PAPER, micro_batch=4),
}


def _option(default: Any, text: str) -> Any:
    """A field with the line that --help says of it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    out: str = _option("", "the run's folder")
    encoding: str = _option("cable", "the positional encoding, by name")
    encoding_options: dict[str, Any] | None = _option(None, 'its options: {"slopes": "interleaved"}')  # noqa: RUF009
    share_encoding: bool = _option(False, "one encoding for all layers instead of one each")
    preset: str = _option("nano", "the size: nano, tiny, small, medium or large")
    sizes: dict[str, Any] | None = _option(None, 'other than the preset: {"n_layer": 2}')  # noqa: RUF009
    data: str = _option("stdlib", "stdlib, a file, a folder, wikitext-103, fineweb-edu, or owner/name of the hub")
    held_out: str | None = _option(None, "other data for the held-out loss; all of --data is then trained on")
    tokenizer: str | None = _option(None, "bytes, bpe:SIZE, gpt2, or a folder")
    separate_documents: bool = _option(False, "attention does not reach from one document into another")
    length: int | None = _option(None, "tokens in a sequence")
    batch_tokens: int | None = _option(None, "tokens in a step, over all processes")
    micro_batch: int | None = _option(None, "sequences that a process works on at a time")
    steps: int | None = _option(None, "steps in all")
    learning_rate: float | None = _option(None, "its highest value")
    final_learning_rate: float | None = _option(None, "its value at the end of the cosine")
    warmup: int | None = _option(None, "steps until the highest value")
    weight_decay: float = _option(0.1, "of matrices; encodings say themselves what must not decay")
    beta1: float = _option(0.9, "AdamW's first beta")
    beta2: float = _option(0.95, "AdamW's second beta")
    clip: float = _option(1.0, "the largest norm of the gradient")
    seed: int = _option(1337, "of the weights and of the order of the data")
    precision: Literal["auto", "float32", "bfloat16"] = _option("auto", "auto is bfloat16 on GPUs that have it")
    device: str = _option("auto", "cpu, cuda, or auto")
    compile: bool = _option(False, "run the model through torch.compile")
    sharded: bool = _option(False, "FSDP2 instead of DDP, for what does not fit into one process")
    recompute: bool = _option(False, "recompute layers in the backward pass, to save memory")
    resume: bool = _option(False, "go on from the last whole checkpoint in --out, if there is one")
    checkpoint_every: int = _option(500, "steps between checkpoints; the last step always has one")
    keep: int = _option(2, "how many checkpoints are kept")
    evaluate_every: int = _option(250, "steps between measurements of the held-out loss")
    evaluate_lengths: list[int] | None = _option(None, "at which lengths; 1, 2, 4 times --length")  # noqa: RUF009
    evaluate_tokens: int = _option(16_384, "held-out tokens measured at each length")
    maps_every: int = _option(0, "steps between snapshots of the position maps; 0 for none")
    log_every: int = _option(50, "steps between log lines where there is no terminal")
    tensorboard: bool = _option(False, "write events for TensorBoard too")
    dry_run: bool = _option(False, "say what would be trained, and stop")
    version: int = _option(FORMAT, "of the config; leave it as it is")

    def resolved(self) -> "Settings":
        """The same with everything filled in from the preset's recipe, or an error."""
        if self.version != FORMAT:
            raise ValueError(
                f"the config must be of version {FORMAT}; {self.version} came. Use the Lengthwise that wrote it, "
                "or start a new run."
            )
        if self.preset not in RECIPES:
            raise ValueError(
                f"unknown preset {self.preset!r}; there are {', '.join(map(repr, RECIPES))}. Take one of them."
            )
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        recipe = dataclasses.asdict(RECIPES[self.preset])
        if self.warmup is None and self.steps is not None and recipe["warmup"] >= self.steps:
            # A short trial of a long recipe, whose warm-up would never end.
            recipe["warmup"] = self.steps // 10
        return Settings(**(recipe | given))


@dataclass(frozen=True)
class Settings(TrainConfig):
    """A config with nothing left open, and checked."""

    tokenizer: str = ""
    length: int = 0
    batch_tokens: int = 0
    micro_batch: int = 0
    steps: int = 0
    learning_rate: float = 0.0
    final_learning_rate: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        from lengthwise.errors import check_int, check_number

        counts = ("batch_tokens", "micro_batch", "steps", "checkpoint_every", "keep", "evaluate_every")
        for name in (*counts, "evaluate_tokens", "log_every"):
            check_int(name, getattr(self, name), "Change it.")
        for name in ("warmup", "seed", "maps_every"):
            check_int(name, getattr(self, name), "Change it.", least=0)
        for name in ("learning_rate", "final_learning_rate", "clip"):
            check_number(name, getattr(self, name), "Change it.")
        for length in (self.length, *(self.evaluate_lengths or ())):
            check_int("a length", length, "One token predicts nothing.", least=2)
        if self.batch_tokens % self.length:
            raise ValueError(
                f"batch_tokens must be whole sequences of {self.length}; {self.batch_tokens} came. "
                f"Use {max(1, self.batch_tokens // self.length) * self.length}."
            )
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must end before the last step, {self.steps}; {self.warmup} came. Lower it.")

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.batch_tokens // self.length

    def kept(self) -> dict[str, Any]:
        """What config.yaml has."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_KEPT}

    def check_resumes(self, stored: dict[str, Any]) -> None:
        """An error if a run that was started as `stored` would go on as another one."""
        if stored.get("version") != FORMAT:
            raise ValueError(
                f"the run's config must be of version {FORMAT}; it is of {stored.get('version')!r}. "
                "Resume it with the Lengthwise that started it."
            )
        mine = self.kept()
        others = sorted(
            name
            for name in mine.keys() | stored.keys()
            if name not in MAY_CHANGE and mine.get(name) != stored.get(name)
        )
        if others:
            changes = ", ".join(f"{name}: {stored.get(name)!r} then, {mine.get(name)!r} now" for name in others)
            raise ValueError(
                f"a run must be resumed as it was started; there is another {changes}. "
                "Leave these out when you resume, or start a new run in another folder."
            )
