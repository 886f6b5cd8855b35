"""The runs of a study: one for each encoding and seed, each a training command of its own."""

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from lengthwise.encodings.registry import find
from lengthwise.runs import Run
from lengthwise.study.config import StudyConfig
from lengthwise.train.config import Settings, TrainConfig
from lengthwise.train.loop import model_config

SHARED = (
    "preset",
    "sizes",
    "data",
    "tokenizer",
    "length",
    "batch_tokens",
    "micro_batch",
    "steps",
    "learning_rate",
    "final_learning_rate",
    "warmup",
    "device",
)
"""The fields that every run of a study has from its config."""


@dataclass(frozen=True)
class Part:
    """One run: an encoding with a seed."""

    encoding: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The run's own name."""
        return f"{self.encoding}-{self.seed}"

    @property
    def settings(self) -> Settings:
        """Its config with nothing left open."""
        return self.config.resolved()

    @property
    def run(self) -> Run | None:
        """The run, once it was begun."""
        return Run(self.config.out) if Run.is_run(self.config.out) else None

    @property
    def is_finished(self) -> bool:
        """Whether its final model is there."""
        return self.run is not None and self.run.is_finished

    @property
    def is_being_trained(self) -> bool:
        """Whether a process is at it now."""
        return not self.is_finished and self.run is not None and self.run.is_being_written

    @property
    def steps_done(self) -> int:
        """How far it has come."""
        found = self.run.metrics if self.run is not None else []
        return int(found[-1]["step"]) if found else 0

    def arguments(self) -> list[str]:
        """What follows `lengthwise`: the encoding, and the options that differ from their defaults."""
        plain = TrainConfig()
        found = ["train"]
        for option in dataclasses.fields(TrainConfig):
            value = getattr(self.config, option.name)
            if value == getattr(plain, option.name) and option.name != "encoding":
                continue
            if isinstance(value, bool):
                found.append(f"--{option.name}" if value else f"--no_{option.name}")
            else:
                found += [f"--{option.name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
        return found

    @property
    def command(self) -> str:
        """The command that trains it, for a shell."""
        return shlex.join(["lengthwise", *self.arguments()])


def parts(config: StudyConfig) -> list[Part]:
    """All runs of a study, seed by seed, so that a study that is stopped early has all encodings."""
    if not config.encodings or not config.seeds:
        raise ValueError("a study needs an encoding and a seed at least; none came. Give --encodings and --seeds.")
    for what, values in (("encodings", config.encodings), ("seeds", config.seeds)):
        if len(set(values)) != len(values):
            raise ValueError(f"the {what} of a study must differ; {values} came. Leave out what comes twice.")
    for encoding in (*config.encodings, *config.encoding_options):
        find(encoding)
    shared = {name: getattr(config, name) for name in SHARED}
    # Other lengths are measured at the end, and better; while training they would only take time.
    length = TrainConfig(**shared).resolved().length
    found = []
    for seed in config.seeds:
        for encoding in config.encodings:
            folder = Path(config.out) / "runs" / f"{encoding}-{seed}"
            settings = TrainConfig(
                out=str(folder),
                encoding=encoding,
                encoding_options=config.encoding_options.get(encoding),
                seed=seed,
                resume=True,
                evaluate_lengths=[length],
                **shared,
            )
            model_config(settings.resolved(), vocabulary=1)  # an error for options that the encoding does not take
            found.append(Part(encoding, seed, settings))
    return found


def commands(config: StudyConfig) -> list[str]:
    """One command for each run that is missing; any scheduler may run them, in any order."""
    return [part.command for part in parts(config) if not part.is_finished]
