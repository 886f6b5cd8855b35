"""The options of a training run as one flat dataclass, and the recipe of each preset.

An option that is None comes from the preset's recipe. Only plain values, so that a config file cannot run code. torch
is not loaded here: the command line is made from these fields.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lengthwise.files import missing_path
from lengthwise.options import option

Objective = Literal["causal", "mlm", "contrastive"]
Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")
FORMAT = 2
"""The version of the config; it rises when a field changes its meaning."""

NOT_STORED = ("out", "resume", "dry_run", "hardware", "token_store")
"""Where and whether, not what: not part of config.yaml, so that a run can be repeated elsewhere from it."""

OBJECTIVE_OF = {
    "mask_rate": "mlm",
    "pooling": "contrastive",
    "temperature": "contrastive",
    "hard_negatives": "contrastive",
}
"""Options of one objective alone."""

MAY_CHANGE = (
    *NOT_STORED,
    "micro_batch",
    "device",
    "compile",
    "sharded",
    "context_parallel",
    "recompute",
    "checkpoint_every",
    "keep",
    "maps_every",
    "log_every",
    "tensorboard",
)
"""Options that may change when a run is resumed: they change no number except by rounding."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a preset is trained where a config leaves these open."""

    tokenizer: str
    length: int
    batch_tokens: int
    micro_batch: int
    steps: int
    optimizer: "Optimizer"
    learning_rate: float
    final_learning_rate: float
    encoding_learning_rate: float
    warmup: int


PAPER = Recipe(
    tokenizer="gpt2",
    length=1024,
    batch_tokens=524_288,
    micro_batch=16,
    steps=19_073,
    optimizer="adamw",
    learning_rate=6e-4,
    final_learning_rate=6e-5,
    encoding_learning_rate=6e-4,
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
        optimizer="muon",
        learning_rate=1.2e-2,
        final_learning_rate=1.2e-3,
        encoding_learning_rate=1.2e-1,
        warmup=40,
    ),
    "tiny": PAPER,
    "small": PAPER,
    "medium": dataclasses.replace(PAPER, micro_batch=8),
    "large": dataclasses.replace(PAPER, micro_batch=4),
}


PAPER_ENCODER = dataclasses.replace(PAPER, length=512, micro_batch=32)
"""BERT at 512 tokens, as the CABLE paper has it; what it does not say is as in its other runs on FineWeb-Edu."""

ENCODER_RECIPES = {"nano": RECIPES["nano"], "tiny": PAPER_ENCODER, "base": PAPER_ENCODER}
"""For masked training."""

CONTRASTIVE_RECIPES = {
    # Pairs of a step are one another's negatives, so that they are one batch.
    "nano": dataclasses.replace(
        RECIPES["nano"],
        tokenizer="start",
        batch_tokens=4_096,
        micro_batch=32,
        steps=150,
        learning_rate=2e-3,
        final_learning_rate=2e-4,
        encoding_learning_rate=2e-3,
        warmup=15,
    ),
} | dict.fromkeys(
    ("tiny", "base"),
    dataclasses.replace(
        PAPER_ENCODER,
        tokenizer="start",
        batch_tokens=32_768,
        micro_batch=64,
        steps=19_531,
        learning_rate=5e-5,
        final_learning_rate=5e-6,
        encoding_learning_rate=5e-5,
        warmup=977,
    ),
)
"""For contrastive training: a sequence is a document with its query; the tokenizer is that of --start-from."""

CONTINUED = Recipe(
    tokenizer="start",
    length=512,
    batch_tokens=8_192,
    micro_batch=4,
    steps=1_000,
    optimizer="adamw",
    learning_rate=1e-4,
    final_learning_rate=1e-5,
    encoding_learning_rate=1e-3,
    warmup=50,
)
"""For a model of transformers that goes on: gentle, and tuned for none. The tokenizer is that of --start-from."""

RECIPES_BY_OBJECTIVE = {"causal": RECIPES, "mlm": ENCODER_RECIPES, "contrastive": CONTRASTIVE_RECIPES}

OTHER_RATES = dict.fromkeys((("causal", "nano", "adamw"), ("mlm", "nano", "adamw")), (3e-3, 3e-4))
"""By objective, preset and optimizer: the highest and the last rate where the recipe's are for another optimizer."""


def recipe_for(objective: Objective, preset: str, optimizer: Optimizer | None) -> Recipe:
    """The recipe of a preset; under another optimizer than its own, where nothing was tuned, with one rate for all."""
    recipe = RECIPES_BY_OBJECTIVE[objective][preset]
    if optimizer in (None, recipe.optimizer):
        return recipe
    own = recipe.learning_rate, recipe.final_learning_rate
    highest, last = OTHER_RATES.get((objective, preset, str(optimizer)), own)
    return dataclasses.replace(recipe, learning_rate=highest, final_learning_rate=last, encoding_learning_rate=highest)


def tuned_rates(preset: str, encoding: str) -> dict[str, float]:
    """The rates that were chosen for an encoding; none where it was not tuned.

    The table is what `lengthwise study --tune` wrote: every try and its loss on a part of the training text that no
    report uses. Each encoding has four tries; CABLE has two more, of when the ladder only rose.
    """
    return dict(_tuned_table().get(preset, {}).get("chosen", {}).get(encoding, {}))


class RateChoice(NamedTuple):
    """How the learning rates of an encoding were chosen."""

    data: str
    """On a part of its training text."""
    seed: int
    tries: list[dict[str, Any]]
    """Each with its rates and its loss, which is None where it failed."""

    def words(self) -> str:
        """The tries in words.

        >>> tries = [{"learning_rate": r, "encoding_learning_rate": r, "loss": r} for r in (0.2, 0.1)]
        >>> RateChoice("stdlib", 7, tries).words()
        '2 tries, learning rates 0.1 and 0.2, of which 0.1 was best'
        """
        is_of_model = len({one["learning_rate"] for one in self.tries}) > 1
        name = "learning_rate" if is_of_model else "encoding_learning_rate"
        *most, last = [f"{rate:.2g}" for rate in sorted(one[name] for one in self.tries)]
        best = min((one for one in self.tries if one["loss"] is not None), key=lambda one: one["loss"])[name]
        whose = "learning rates" if is_of_model else "rates of its own parameters"
        return f"{len(self.tries)} tries, {whose} {', '.join(most)} and {last}, of which {best:.2g} was best"


def choice_from(content: dict[str, Any], encoding: str) -> RateChoice | None:
    """How the rates of an encoding were chosen, from what --tune wrote; None where they were not."""
    if encoding not in content["chosen"]:
        return None
    return RateChoice(content["data"], content["seed"], content["tries"][encoding])


def rate_choice(config: "ResolvedTrainConfig") -> RateChoice | None:
    """How the rates of a run were chosen; None where it has others than those that were."""
    chosen = tuned_rates(config.preset, config.tuned_by) if config.objective == "causal" else {}
    if not chosen or any(getattr(config, name) != rate for name, rate in chosen.items()):
        return None
    return choice_from(_tuned_table()[config.preset], config.tuned_by)


@functools.cache
def _tuned_table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("lengthwise.train") / "tuned_rates.json").read_text())
    return content


def is_theirs(source: str) -> bool:
    """Whether weights to start from are those of a model of transformers, not of one of ours; nothing is loaded."""
    folder = Path(source)
    folder = folder / "final" if (folder / "final").is_dir() else folder
    if (folder / "config.json").is_file():
        return not str(json.loads((folder / "config.json").read_text()).get("model_type")).startswith("lengthwise")
    # A name on the hub need not have an owner: gpt2.
    return not folder.exists()


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run."""

    out: str = option("", "the run's folder")
    objective: Objective = option(  # noqa: RUF009
        "causal", "causal: the next token; mlm: masked tokens, an encoder; contrastive: documents that answer queries"
    )
    encoding: str | None = option(None, "the positional encoding, by name; default cable")
    encoding_options: dict[str, Any] | None = option(None, 'its options: {"slopes": "interleaved"}')  # noqa: RUF009
    share_encoding: bool = option(False, "one encoding for all layers instead of one each")
    layers: list[Any] | str | None = option(None, "encodings and windows by layer: rope:512,none")  # noqa: RUF009
    preset: str = option("nano", "the size: nano, tiny, small, medium or large; of encoders nano, tiny or base")
    sizes: dict[str, Any] | None = option(None, 'changes to the preset: {"n_layer": 2}')  # noqa: RUF009
    data: str = option("stdlib", "stdlib, a file, a folder, wikitext-103, fineweb-edu, or owner/name of the hub")
    held_out: str | None = option(None, "other data for the held-out (validation) loss; all of --data is trained on")
    token_store: str | None = option(None, "where prepared token files are read from, by fsspec: s3://bucket/tokens")
    tokenizer: str | None = option(None, "bytes, bpe:SIZE, gpt2, or a folder")
    tuning: bool = option(
        False, "train without a twentieth of the training text, and measure the loss on that: to choose options"
    )
    separate_documents: bool = option(False, "attention does not reach from one document into another")
    positions: str | None = option(None, "positions drawn anew for each sequence: random:8192, or pose:8")
    start_from: str | None = option(
        None,
        "or --from: a Lengthwise run, to start from its weights except the encodings'; or a Hugging Face checkpoint, "
        "to put --encoding into it and train it further",
        alias="from",
    )
    mask_rate: float = option(0.15, "mlm: the share of tokens that are predicted; 0.3 as ModernBERT")
    pooling: Literal["mean", "first"] = option(
        "mean", "contrastive: a text's vector, the mean or that of the first token"
    )
    temperature: float = option(0.05, "contrastive: what cosines are divided by")
    hard_negatives: int = option(1, "contrastive: how many of a pair's own negatives are used, beside the batch's")
    length: int | None = option(None, "the training length: tokens in a sequence")
    batch_tokens: int | None = option(None, "tokens in an optimizer step, over all processes")
    micro_batch: int | None = option(None, "sequences in a forward pass of a process (gradient accumulation)")
    steps: int | None = option(None, "steps of the run")
    optimizer: Optimizer | None = option(  # noqa: RUF009
        None, "adamw, or muon for the matrices of the blocks and AdamW for the rest"
    )
    learning_rate: float | None = option(None, "the peak learning rate")
    final_learning_rate: float | None = option(None, "the learning rate at the end of the cosine decay")
    encoding_learning_rate: float | None = option(None, "the peak learning rate of the encoding's own parameters")
    warmup: int | None = option(None, "warm-up steps, up to the peak learning rate")
    weight_decay: float = option(0.1, "weight decay of matrices; encodings say themselves what must not decay")
    beta1: float = option(0.9, "AdamW's first beta")
    beta2: float = option(0.95, "AdamW's second beta")
    clip: float = option(1.0, "gradient clipping: the largest norm of the gradient")
    seed: int = option(1337, "random seed of the weights and of the order of the data")
    precision: Literal["auto", "float32", "bfloat16"] = option("auto", "auto is bfloat16 on GPUs that have it")
    device: str = option("auto", "cpu, cuda, or auto")
    compile: bool = option(False, "run the model through torch.compile")
    sharded: bool = option(False, "FSDP2 instead of DDP, for what does not fit into one process")
    context_parallel: int = option(1, "processes that share each sequence, where one cannot hold it: ring attention")
    recompute: bool = option(False, "gradient checkpointing: recompute layers in the backward pass, to save memory")
    resume: bool = option(
        False, "continue from the last complete checkpoint in --out; without a run there, a new one begins"
    )
    checkpoint_every: int = option(500, "steps between checkpoints; the last step always has one")
    keep: int = option(2, "how many checkpoints are kept")
    evaluate_every: int = option(250, "steps between measurements of the held-out (validation) loss")
    evaluate_lengths: list[int] | None = option(None, "at which lengths; 1, 2, 4 times --length")  # noqa: RUF009
    evaluate_tokens: int = option(16_384, "held-out tokens measured at each length")
    maps_every: int = option(0, "steps between snapshots of the position maps, the first before any step; 0 for none")
    log_every: int = option(
        50, "steps between log lines where there is no terminal, and between looks at a GPU's losses"
    )
    tensorboard: bool = option(False, "write events for TensorBoard too")
    dry_run: bool = option(False, "print what would be trained, and stop")
    hardware: dict[str, Any] | None = option(  # noqa: RUF009
        None, 'for --dry-run: {"devices": 8, "memory_gb": 80, "tflops": 989, "utilisation": 0.4}'
    )
    version: int = option(FORMAT, "of the config; leave it as it is")

    @property
    def tuned_by(self) -> str:
        """The encoding or the schedule of layers, by which rates are tuned; LengthwiseConfig has the same default."""
        return str(self.layers) if self.layers is not None else self.encoding or "cable"

    @property
    def goes_on(self) -> bool:
        """Whether a model of transformers is trained further, with an encoding fitted into it."""
        return self.objective == "causal" and self.start_from is not None and is_theirs(self.start_from)

    def _check_goes_on(self) -> None:
        """An error for a model of transformers that is not there, and for options that it decides or cannot have."""
        if self.start_from is not None and (fault := missing_path(self.start_from)) is not None:
            expected = "--start-from must be a run, a checkpoint folder or a name on the hub"
            raise ValueError(f"{expected}, got {self.start_from!r}: {fault}")
        if self.preset != "nano":
            raise ValueError(f"--start-from decides the sizes of the model, got --preset {self.preset}")
        if self.tokenizer not in (None, "start"):
            raise ValueError(f"--start-from decides the tokenizer, got --tokenizer {self.tokenizer}")
        if self.encoding is not None and self.layers is not None:
            raise ValueError("--encoding and --layers say the same thing, got both")
        if self.optimizer == "muon":
            raise ValueError("muon is for models of Lengthwise; use --optimizer adamw")
        for name in ("sizes", "share_encoding", "sharded"):
            if getattr(self, name):
                raise ValueError(f"a model of transformers goes on without --{name.replace('_', '-')}, got it")
        if self.context_parallel > 1:
            raise ValueError("a model of transformers goes on without --context-parallel, got it")

    def resolved(self) -> "ResolvedTrainConfig":
        """The same with every open option filled in from the preset's recipe, and checked."""
        if self.version != FORMAT:
            raise ValueError(
                f"the config must be of version {FORMAT}, got {self.version}; use the Lengthwise that wrote it, or "
                "start a new run"
            )
        recipes = RECIPES_BY_OBJECTIVE.get(self.objective)
        if recipes is None:
            known = ", ".join(map(repr, RECIPES_BY_OBJECTIVE))
            raise ValueError(f"unknown objective {self.objective!r}; known: {known}")
        goes_on = self.goes_on
        if goes_on:
            self._check_goes_on()
            recipes = {"nano": CONTINUED}
        if self.preset not in recipes:
            known = ", ".join(map(repr, recipes))
            raise ValueError(f"unknown preset {self.preset!r}; known: {known}")
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        recipe = dataclasses.asdict(CONTINUED if goes_on else recipe_for(self.objective, self.preset, self.optimizer))
        # Only causal models of ours were tuned.
        if self.objective == "causal" and not goes_on and self.optimizer in (None, recipe["optimizer"]):
            recipe |= tuned_rates(self.preset, self.tuned_by)
        if self.learning_rate is not None:
            # The last rate and the encoding's keep their ratios to the model's.
            for name in ("final_learning_rate", "encoding_learning_rate"):
                recipe[name] *= self.learning_rate / recipe["learning_rate"]
        if self.warmup is None and self.steps is not None and recipe["warmup"] >= self.steps:
            # A short trial of a long recipe, whose warm-up would never end.
            recipe["warmup"] = self.steps // 10
        given_elsewhere = self.layers is not None or self.objective == "contrastive" or goes_on
        encoding = {} if given_elsewhere else {"encoding": "cable"}
        return ResolvedTrainConfig(**(recipe | encoding | given))


@dataclass(frozen=True)
class ResolvedTrainConfig(Recipe, TrainConfig):
    """A config with no option of the recipe left open; the recipe's fields take the place of the optional ones."""

    def __post_init__(self) -> None:
        from lengthwise.errors import check_choice, check_int, check_number

        counts = ("batch_tokens", "micro_batch", "steps", "checkpoint_every", "keep", "evaluate_every")
        for name in (*counts, "evaluate_tokens", "log_every"):
            check_int(name, getattr(self, name))
        for name in ("warmup", "seed", "maps_every"):
            check_int(name, getattr(self, name), least=0)
        for name in ("learning_rate", "final_learning_rate", "encoding_learning_rate", "clip"):
            check_number(name, getattr(self, name))
        if self.positions is not None and self.separate_documents:
            raise ValueError(
                "positions that restart mark documents, so drawn ones cannot go with them, got --positions and "
                "--separate-documents; leave one of them out"
            )
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.tuning and self.held_out is not None:
            raise ValueError("tuning measures the loss on a part of --data, got --held-out too; leave one of them out")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a number from 0 to below 1, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay must be a number, 0 or more, got {self.weight_decay}")
        self._check_objective()
        check_int("length", self.length, least=2)
        check_int("context_parallel", self.context_parallel)
        if self.context_parallel > 1 and self.length < 2 * self.context_parallel:
            raise ValueError(
                f"{self.context_parallel} processes share sequences of {2 * self.context_parallel} tokens or more, got "
                f"--length {self.length}; use fewer, or longer sequences"
            )
        if self.context_parallel > 1 and self.compile:
            raise ValueError(
                "--context-parallel exchanges keys between processes, which no graph holds; leave out --compile"
            )
        for length in self.evaluate_lengths or ():
            check_int("evaluate_lengths", length, least=2 * self.context_parallel)
        if self.batch_tokens % self.length:
            raise ValueError(
                f"batch_tokens must be whole sequences of {self.length}, got {self.batch_tokens}; use "
                f"{max(1, self.batch_tokens // self.length) * self.length}"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"warmup must end before the last step, {self.steps}, got {self.warmup}")

    def _check_objective(self) -> None:
        """An error for options that the objective cannot have."""
        from lengthwise.errors import check_choice, check_int, check_number

        check_number("mask_rate", self.mask_rate, most=1)
        check_number("temperature", self.temperature)
        check_int("hard_negatives", self.hard_negatives, least=0)
        check_choice("pooling", self.pooling, ("mean", "first"))
        if self.objective != "causal" and self.context_parallel > 1:
            raise ValueError(
                f"processes can share sequences of the objective causal alone, got {self.objective} and "
                "--context-parallel"
            )
        if self.objective != "contrastive":
            return
        if self.start_from is None:
            raise ValueError("contrastive training must start from a trained encoder, got none; give --start-from RUN")
        for name in ("encoding", "encoding_options", "layers", "sizes", "held_out", "positions"):
            if getattr(self, name) is not None:
                raise ValueError(f"--start-from decides the model and --data the pairs, got --{name.replace('_', '-')}")
        if self.tuning or self.separate_documents:
            raise ValueError("contrastive training knows neither --tuning nor --separate-documents")
        if self.sequences < 2 and not self.hard_negatives:
            raise ValueError(
                "contrastive training needs negatives, got one pair a step and --hard-negatives 0; raise --batch-tokens"
            )

    def check_one_batch(self, processes: int) -> None:
        """An error unless each of so many processes has its part of a contrastive step as one batch."""
        part = -(-self.sequences // processes)
        if self.micro_batch < part:
            raise ValueError(
                "the pairs of a contrastive step are one another's negatives, so that every process has its part as "
                f"one batch: micro_batch must be at least {part}, got {self.micro_batch}"
            )

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.batch_tokens // self.length

    def stored(self) -> dict[str, Any]:
        """The content of config.yaml."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_STORED}

    def unused_options(self) -> list[str]:
        """Options that were given for nothing, in words; no errors, since a config file can serve several commands."""
        plain = TrainConfig()
        unused = [
            f"--{name.replace('_', '-')} is for --objective {owner}"
            for name, owner in OBJECTIVE_OF.items()
            if self.objective != owner and getattr(self, name) != getattr(plain, name)
        ]
        return unused + ["--hardware is for --dry-run"] * (self.hardware is not None)

    def check_resumes(self, stored: dict[str, Any]) -> None:
        """An error if a run that was started as `stored` would continue as another one."""
        if stored.get("version") != FORMAT:
            raise ValueError(
                f"the run's config must be of version {FORMAT}, got {stored.get('version')!r}; resume it with the "
                "Lengthwise that started it"
            )
        now = self.stored()
        # Options that are younger than the run had their default.
        stored = {field.name: field.default for field in dataclasses.fields(TrainConfig)} | stored
        changed = sorted(
            name for name in now.keys() | stored.keys() if name not in MAY_CHANGE and now.get(name) != stored.get(name)
        )
        if changed:
            changes = ", ".join(f"{name}: {stored.get(name)!r} then, {now.get(name)!r} now" for name in changed)
            raise ValueError(
                f"a run must be resumed with the options it was started with, got another {changes}; leave these out, "
                "or start a new run in another folder"
            )
