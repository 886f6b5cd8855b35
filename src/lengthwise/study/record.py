"""What a report needs of one run, in one small file: with it the run's folder can go, or never was on this machine.

A study takes a run as done when its record is of the same training, the same measurement, the same text and the same
version; and of the same weights, where these are here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from lengthwise import __version__
from lengthwise.evaluate import Score
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.files import read_stored, write_atomic
from lengthwise.study.runs import StudyRun
from lengthwise.train.config import MAY_CHANGE

RECORDS = "records"
TRAINING = "training"
CURVE = 100
"""Points of a loss curve."""


@dataclass(frozen=True)
class TrainingOutcome:
    """How the training of a run ended: what it used, or why it failed."""

    seconds: float
    peak_bytes: int | None
    """The most memory that its process had, looked at every second; None where that cannot be seen."""
    threads: int
    failure: str | None = None


def outcome_path(out: str | Path, run: StudyRun) -> Path:
    """Where a study has the outcome of a run that it trained."""
    return Path(out) / TRAINING / f"{run.name}.json"


def write_outcome(path: Path, outcome: TrainingOutcome) -> None:
    """As one line of JSON."""
    write_atomic(path, json.dumps(asdict(outcome)) + "\n")


def read_outcome(out: str | Path, run: StudyRun) -> TrainingOutcome | None:
    """The outcome of a run that this study trained, from its file."""
    content = read_stored(outcome_path(out, run))
    return TrainingOutcome(**content) if content else None


@dataclass(frozen=True)
class TrainingSummary:
    """How far a run trained, and its losses: the last step and the mean of each hundredth of the steps."""

    step: int
    tokens: int
    seconds: float
    losses: list[tuple[int, float]]

    @classmethod
    def of(cls, metrics: Sequence[dict[str, Any]]) -> Self | None:
        """Of the metrics of a run; None where it has none yet."""
        if not metrics:
            return None
        size = max(1, len(metrics) // CURVE)
        groups = [metrics[i : i + size] for i in range(0, len(metrics), size)]
        losses = [(int(group[-1]["step"]), sum(line["loss"] for line in group) / len(group)) for group in groups]
        last = metrics[-1]
        return cls(int(last["step"]), int(last["tokens"]), float(last["seconds"]), losses)


@dataclass(frozen=True)
class RunRecord:
    """The measurement of a run, how it was trained, and where the measurement comes from."""

    scores: list[Score]
    tasks: list[TaskScore]
    skipped: dict[int, float]
    """By length: the share of attention's work that it leaves out."""
    training: TrainingSummary
    outcome: TrainingOutcome | None
    """None for a run that no study trained."""
    weights: list[str]
    """Their checksums."""
    born: dict[str, Any]
    """The certificate of the measurement: command, commit, date, machine and versions."""
    training_born: list[dict[str, Any]] = field(default_factory=list)
    """Those of the calls that trained the run; none where its folder, or a record of before they were stored, has none.
    """
    measuring_seconds: float | None = None
    """None in records of when it was not taken."""

    def write(self, path: Path, key: dict[str, Any]) -> Self:
        """As one line of JSON, with the key of what was measured."""
        write_atomic(path, json.dumps({"key": key} | asdict(self)) + "\n")
        return self

    @classmethod
    def read(cls, path: Path, key: dict[str, Any]) -> Self | None:
        """The record in a file; None where there is none with this key."""
        content = read_stored(path)
        if content.pop("key", None) != json.loads(json.dumps(key)):
            return None
        training, outcome = content["training"], content["outcome"]
        return cls(
            scores=list(map(Score.from_json, content["scores"])),
            tasks=[TaskScore(**score) for score in content["tasks"]],
            skipped={int(length): share for length, share in content["skipped"].items()},
            training=TrainingSummary(**(training | {"losses": [(step, loss) for step, loss in training["losses"]]})),
            outcome=None if outcome is None else TrainingOutcome(**outcome),
            weights=content["weights"],
            born=_of_measurement(content["born"]),
            training_born=content.get("training_born", []),
            measuring_seconds=content.get("measuring_seconds"),
        )


def _of_measurement(born: dict[str, Any]) -> dict[str, Any]:
    """A measurement's certificate: those of before the training had its own had the command of the training in it."""
    born = dict(born)
    return born | {"command": born.pop("measured_by")} if "measured_by" in born else born


def differences(path: Path, key: dict[str, Any]) -> list[str]:
    """In which of these parts of its key the record in a file, if there is one, is another; a version by its number."""
    stored, key = read_stored(path).get("key"), json.loads(json.dumps(key))
    if stored is None:
        return []
    names = [name for name in key if stored.get(name) != key[name]]
    return [f"version ({stored.get(name)})" if name == "version" else name for name in names]


def record_path(out: str | Path, run: StudyRun) -> Path:
    """Where a study has the record of a run."""
    return Path(out) / RECORDS / f"{run.name}.json"


def training_key(run: StudyRun) -> dict[str, Any]:
    """What a run's training depends on, as JSON has it; options that change no number but by rounding are not in it."""
    stored = {name: value for name, value in run.resolved.stored().items() if name not in MAY_CHANGE}
    key: dict[str, Any] = json.loads(json.dumps(stored))
    return key


def record_key(run: StudyRun, evaluation: ResolvedEvalConfig) -> dict[str, Any]:
    """What a record depends on beside the weights and the text, which take reading."""
    return {"training": training_key(run), "measure": asdict(evaluation), "version": __version__}


def is_recorded(out: str | Path, run: StudyRun, evaluation: ResolvedEvalConfig) -> bool:
    """Whether a study has measured a run that was trained so, in this manner; here or on another machine."""
    path = record_path(out, run)
    return bool(read_stored(path)) and not differences(path, record_key(run, evaluation))
