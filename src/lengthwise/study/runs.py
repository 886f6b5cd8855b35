"""The runs of a study: one for each encoding and seed, each with a training command of its own."""

import dataclasses
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lengthwise.encodings.registry import find
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.files import appears
from lengthwise.runs import FINAL, SEAL, Run
from lengthwise.study.config import HYPOTHESIS_KINDS, StudyConfig
from lengthwise.train.config import ResolvedTrainConfig, TrainConfig
from lengthwise.train.setup import model_config

RATES = ("learning_rate", "final_learning_rate", "encoding_learning_rate")
"""What a study may set by encoding."""
RUNS = "runs"
"""The folder of a study's runs."""
LENGTH_MULTIPLES = (1, 2, 4, 8, 16)
WINDOWS = 128
NOT_CONTRASTIVE = frozenset({"objective", "out", "start_from", "seed", "resume", "encoding", "layers", "sizes"})
"""What a study sets itself for contrastive training."""


@dataclass(frozen=True)
class StudyRun:
    """One run: an encoding with a seed."""

    encoding: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return Path(self.config.out).name

    @property
    def resolved(self) -> ResolvedTrainConfig:
        """Its config with every option filled in."""
        return self.config.resolved()

    @cached_property
    def rescores(self) -> bool:
        """Whether an encoding of any layer replaces the scores."""
        schedule = model_config(self.resolved, vocabulary=1).schedule
        return any(find(name).overrides("rescore") for spec in schedule for name, _ in spec.parts())

    @property
    def run(self) -> Run | None:
        """The run, once it was started."""
        return Run(self.config.out) if Run.is_run(self.config.out) else None

    @property
    def is_finished(self) -> bool:
        """Whether its final model is there."""
        return self.run is not None and self.run.is_finished

    def check_finished(self) -> None:
        """An error if a finished run in its folder had other options: its scores would pass for those of this one."""
        if self.run is None or not self.is_finished:
            return
        # A study that was moved has the runs that others start from in another folder.
        stored = self.run.config | {"start_from": self.config.start_from}
        try:
            self.resolved.check_resumes(stored)
        except ValueError as error:
            raise ValueError(f"{self.config.out} is finished: {error}") from error

    def becomes_finished(self) -> bool:
        """Whether its final model is there, or will be soon: another machine may have written it just now."""
        return appears(Path(self.config.out) / FINAL / SEAL) and self.is_finished

    @property
    def is_being_trained(self) -> bool:
        """Whether a process is training it now."""
        return not self.is_finished and self.run is not None and self.run.is_being_written

    @property
    def steps_done(self) -> int:
        """The last step in its metrics."""
        metrics = self.run.metrics if self.run is not None else []
        return int(metrics[-1]["step"]) if metrics else 0

    def arguments(self) -> list[str]:
        """The words after `lengthwise`: the encoding, and the options that differ from their defaults."""
        default = TrainConfig()
        words = ["train"]
        for field in dataclasses.fields(TrainConfig):
            value = getattr(self.config, field.name)
            if value == getattr(default, field.name):
                continue
            name = field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
        return words

    @property
    def command(self) -> str:
        """The command that trains it, for a shell."""
        return shlex.join(["lengthwise", *self.arguments()])


def run_name(encoding: str, seed: int) -> str:
    """The name of a run's folder.

    >>> run_name("rope:64,none", 1)
    'rope64-none-1'
    """
    return f"{encoding.replace(':', '').replace(',', '-')}-{seed}"


def is_schedule(encoding: str) -> bool:
    """Whether it is a schedule of layers, in short, and no encoding."""
    return ":" in encoding or "," in encoding


def training_of(config: StudyConfig, encoding: str) -> TrainConfig:
    """The options of training with one of a study's encodings or schedules."""
    return dataclasses.replace(
        config.training,
        encoding=None if is_schedule(encoding) else encoding,
        layers=encoding if is_schedule(encoding) else None,
        encoding_options=config.encoding_options.get(encoding),
    )


def study_runs(config: StudyConfig) -> list[StudyRun]:
    """All runs of a study, seed by seed, so that a study that is stopped early has all encodings."""
    for name, values in (("encodings", config.encodings), ("seeds", config.seeds)):
        if not values:
            raise ValueError(f"{name} of a study must have at least one, got none")
        if len(set(values)) != len(values):
            raise ValueError(f"{name} of a study must differ, got {values}")
    for encoding in (*config.encodings, *config.encoding_options, *config.rates):
        if not is_schedule(encoding):
            find(encoding)
    for encoding, bounds in config.hypotheses.items():
        if not is_schedule(encoding):
            find(encoding)
        if not bounds or bounds.keys() - HYPOTHESIS_KINDS.keys():
            kinds = ", ".join(map(repr, HYPOTHESIS_KINDS))
            raise ValueError(f"a hypothesis must be one of {kinds} and a number, got {sorted(bounds)} for {encoding!r}")
        of_retrieval = [kind for kind in bounds if HYPOTHESIS_KINDS[kind].quantity != "rise"]
        if of_retrieval and not config.evaluation.retrieval:
            raise ValueError(f"{of_retrieval[0]} is a hypothesis on retrieval, got a study without --retrieval")
    for encoding, given in config.rates.items():
        if unknown := given.keys() - RATES:
            raise ValueError(f"rates must be {', '.join(RATES)}, got {', '.join(sorted(unknown))} for {encoding!r}")
    # Other lengths are measured at the end, and better; while training they would only take time.
    length = config.training.resolved().length
    runs = []
    for seed in config.seeds:
        for encoding in config.encodings:
            rates: dict[str, Any] = dict(config.rates.get(encoding, {}))
            own = dataclasses.replace(
                training_of(config, encoding),
                out=str(Path(config.out) / RUNS / run_name(encoding, seed)),
                seed=seed,
                resume=True,
                evaluate_lengths=[length],
                **rates,
            )
            model_config(own.resolved(), vocabulary=1)  # an error for options that the encoding does not take
            runs.append(StudyRun(encoding, seed, own))
    return runs


def contrastive_runs(config: StudyConfig, runs: list[StudyRun]) -> list[StudyRun]:
    """The contrastive training that follows each masked one where retrieval is measured; none elsewhere."""
    if not config.evaluation.retrieval:
        if config.contrastive:
            raise ValueError(f"contrastive training is for --retrieval, got {config.contrastive} without it")
        return []
    if config.training.objective != "mlm":
        raise ValueError("a study measures retrieval with --objective mlm, got --retrieval with another")
    known = {field.name for field in dataclasses.fields(TrainConfig)} - NOT_CONTRASTIVE
    if unknown := config.contrastive.keys() - known:
        raise ValueError(f"contrastive must have options of training, got {', '.join(map(repr, sorted(unknown)))}")
    shared = {"preset": config.training.preset, "device": config.training.device, "length": config.training.length}
    later = []
    for run in runs:
        own = {"start_from": run.config.out, "seed": run.seed, "out": f"{run.config.out}-retrieval", "resume": True}
        training = TrainConfig(objective="contrastive", **(shared | config.contrastive | own))
        training.resolved().check_one_batch(1)
        later.append(StudyRun(run.encoding, run.seed, training))
    return later


def evaluation_of(config: StudyConfig, run: StudyRun) -> ResolvedEvalConfig:
    """What is measured of every run."""
    lengths = [run.resolved.length * multiple for multiple in LENGTH_MULTIPLES]
    evaluation = config.evaluation.resolved(lengths=lengths, text=config.training.data, windows=WINDOWS)
    return dataclasses.replace(evaluation, lengths=sorted(set(evaluation.lengths)))
