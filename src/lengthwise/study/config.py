"""What a study compares: encodings x seeds, trained alike, measured at several lengths.

The options of training and of measuring are those of `train` and `evaluate`, flat beside the study's own. torch is not
loaded here: the command line is made from these fields.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from lengthwise.errors import check_choice, check_int, check_number
from lengthwise.evaluate.config import EvalConfig
from lengthwise.files import check_folder_to_write
from lengthwise.options import option
from lengthwise.train.config import TrainConfig

EngineName = Literal["local", "ray", "slurm"]
ENGINES: tuple[EngineName, ...] = ("local", "ray", "slurm")

PAPER_ENCODINGS = ["cable", "kerple", "alibi", "fire", "t5-clamped", "rope", "sinusoidal", "none"]
"""Those of the CABLE paper that have no maximal length, and none at all."""

NOT_SHARED = frozenset(
    {
        *("out", "encoding", "encoding_options", "layers", "seed", "resume", "evaluate_lengths", "dry_run", "version"),
        *("tuning", "start_from", "pooling", "temperature", "hard_negatives", "hardware"),
        # What is measured is the held-out split of the data, and each run is a process of its own.
        *("held_out", "sharded", "context_parallel"),
    }
)
"""Options of training that a study sets itself for each run."""


class HypothesisKind(NamedTuple):
    """What is expected of an encoding at eight times the training length: a quantity on one side of a bound."""

    quantity: Literal["rise", "ndcg", "length"]
    """The rise of the loss's metric, the change of nDCG@10, or the longest length whose documents it takes."""
    words: str
    is_upper: bool
    """Whether the quantity is expected up to the bound, or from it."""
    format: str


HYPOTHESIS_KINDS = {
    "at_most": HypothesisKind("rise", "rise at most", True, "+.1%"),
    "above": HypothesisKind("rise", "rise above", False, "+.1%"),
    "ndcg_at_least": HypothesisKind("ndcg", "nDCG@10 changes by at least", False, "+.3f"),
    "ndcg_below": HypothesisKind("ndcg", "nDCG@10 changes by less than", True, "+.3f"),
    "length_at_most": HypothesisKind("length", "takes documents of at most", True, ",.0f"),
}
"""All but the first two are of retrieval."""


@dataclass(frozen=True)
class StudyConfig:
    """The options of a study; `training` and `evaluation` are those that all of its runs share."""

    out: str = option("study", "the study's folder")
    title: str = option("Positional encodings beyond their training length", "the heading of the report")
    encodings: list[str] = option(PAPER_ENCODINGS, "what is compared: encodings, or schedules of layers, rope:64,none")  # noqa: RUF009
    encoding_options: dict[str, dict[str, Any]] = option(  # noqa: RUF009
        {}, 'by encoding: {"sinusoidal": {"amplitude": 0.1}}'
    )
    seeds: list[int] = option([1337], "random seeds; each encoding is trained once with each")  # noqa: RUF009
    jobs: int | None = option(None, "runs that train at the same time; on the CPU one per core, else one")
    engine: EngineName = option("local", "where runs train: local, ray, or slurm (extras of those names)")  # noqa: RUF009
    address: str | None = option(None, "ray: a cluster that exists, such as auto or ray://head:10001; else a local one")
    slurm: dict[str, Any] = option({}, 'slurm: options of submitit: {"slurm_partition": "a100", "timeout_min": 600}')  # noqa: RUF009
    gpus: float | None = option(None, "ray and slurm: the GPU of each run, 1; with ray also a share of one, 0.5")
    cpus: int | None = option(None, "ray and slurm: cores of each run; 1")
    retries: int = option(3, "ray and slurm: how often a run goes on elsewhere whose worker was lost")
    upload: str | None = option(None, "where finished runs are copied to, by fsspec: s3://bucket/study")
    hypotheses: dict[str, dict[str, float]] = option(  # noqa: RUF009
        {}, 'what is expected at eight times the length: {"cable": {"at_most": 0.01}, "rope": {"above": 0.2}}'
    )
    paper: str | None = option(None, "a table of the CABLE paper to compare with, e.g. fineweb-edu-medium")
    beside: str | None = option(None, "the folder of another study to compare with, e.g. of another recipe")
    tune: bool = option(
        False, "first choose the learning rates of each encoding by short trainings on a part of the training text"
    )
    tune_steps: int = option(150, "steps of each of these trainings")
    rates: dict[str, dict[str, float]] = option(  # noqa: RUF009
        {}, 'learning rates by encoding: {"fire": {"encoding_learning_rate": 0.06}}'
    )
    contrastive: dict[str, Any] = option(  # noqa: RUF009
        {}, 'with --objective mlm and --retrieval: options of the contrastive training of each run, {"steps": 200}'
    )
    train: bool = option(True, "train the runs that are missing; with --no-train only measure those that are there")
    training: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        """An error for a folder or an engine that cannot be so, before anything is planned or trained."""
        check_folder_to_write(self.out)
        check_choice("engine", self.engine, ENGINES)
        for name in ("jobs", "cpus"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        check_int("retries", self.retries, least=0)
        if self.gpus is not None:
            check_number("gpus", self.gpus)
            if self.gpus > 1:
                raise ValueError(f"--gpus must be at most 1, since a run is one process, got {self.gpus:g}; see --jobs")
            if self.engine == "slurm" and self.gpus != int(self.gpus):
                raise ValueError(f"--gpus must be a whole number with --engine slurm, got {self.gpus}")
        if self.engine == "ray" and self.gpus is None and self.training.device.startswith("cuda"):
            raise ValueError(
                f"--device {self.training.device} with --engine ray must have --gpus, by which Ray gives each run a "
                "GPU of its own, got none; give --gpus 1"
            )
        used = {"address": self.address is not None, "slurm": bool(self.slurm)}
        owners = {"address": "ray", "slurm": "slurm"}
        for name, is_given in used.items():
            if is_given and self.engine != owners[name]:
                raise ValueError(f"--{name} is for --engine {owners[name]}, got --engine {self.engine}")
        if self.engine == "local" and (self.gpus is not None or self.cpus is not None):
            raise ValueError(
                "--gpus and --cpus are for --engine ray and slurm, got --engine local; see --device and --jobs"
            )

    @classmethod
    def from_options(cls, **options: Any) -> "StudyConfig":
        """A study from flat options, as the command line and config files have them.

        >>> StudyConfig.from_options(seeds=[1, 2], steps=100, windows=8).training.steps
        100
        """
        parts = {part: {f.name for f in fields(part)} for part in (TrainConfig, EvalConfig)}
        parts[TrainConfig] -= NOT_SHARED
        training, evaluation = ({k: v for k, v in options.items() if k in names} for names in parts.values())
        own = {name: value for name, value in options.items() if name not in training.keys() | evaluation.keys()}
        return cls(training=TrainConfig(**training), evaluation=EvalConfig(**evaluation), **own)
