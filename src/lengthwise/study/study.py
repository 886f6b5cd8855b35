"""The whole study: train what is missing, measure, draw, report. Started again it goes on where it was.

out/runs/           the runs, each as `lengthwise train` leaves it
out/training/       what each run said, took and needed, for those that this study trained itself
out/scores/         the measurement of each run, with what was measured
out/maps/           the position maps of each encoding's final layer
out/report.html     the report; report.md the same without pictures, study.json the figures
"""

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from lengthwise.encodings.registry import find
from lengthwise.errors import check_int
from lengthwise.evaluate import LengthTable, Score
from lengthwise.evaluate.measuring import Measure, held_out_text, score_subject
from lengthwise.evaluate.subjects import Subject, load_subject
from lengthwise.evaluate.task_scores import TaskScore, score_task
from lengthwise.files import file_hash, write_atomic
from lengthwise.inspect import position_maps
from lengthwise.study.config import StudyConfig
from lengthwise.study.findings import Findings
from lengthwise.study.paper import check_paper
from lengthwise.study.parts import Part, parts
from lengthwise.study.progress import Progress
from lengthwise.study.report import write_report
from lengthwise.study.training import TRAINED_ELSEWHERE, Outcome, train_parts
from lengthwise.views.style import save_picture

log = logging.getLogger(__name__)
MULTIPLES = (1, 2, 4, 8, 16)
LONGEST_MAP = 512
"""Tokens that heads are drawn for at most, as in the paper."""


def run_study(config: StudyConfig) -> str:
    """Do it, and say what came of it and where the report is."""
    began = time.monotonic()
    chosen = parts(config)
    check_paper(config.paper)
    if config.jobs is not None:
        check_int("jobs", config.jobs, "One trains one run after the other.")
    what = measure_of(config, chosen[0])
    out = Path(config.out)
    with Progress(chosen, what) as progress:
        waiting = [part for part in chosen if not part.is_finished]
        if config.train:
            ended = train_parts(waiting, folder=out / "training", jobs=jobs_of(config, waiting), progress=progress)
            missing = {name: outcome.failure for name, outcome in ended.items() if outcome.failure is not None}
        else:
            missing = {p.name: TRAINED_ELSEWHERE if p.is_being_trained else "not trained yet" for p in waiting}
        for part in chosen:
            progress.trained(part)
        scores: list[Score] = []
        tasks: list[TaskScore] = []
        for part in chosen:
            if part.is_finished:
                progress.begin(f"measuring {part.name}")
                try:
                    found = measured(part, what, out, config.device)
                except (ArithmeticError, LookupError, OSError, RuntimeError, ValueError) as error:
                    log.warning("%s could not be measured: %s", part.name, error)
                    missing[part.name] = f"could not be measured: {error}"
                else:
                    scores += found[0]
                    tasks += found[1]
            progress.measured(part)
    table = LengthTable(scores, rows=rows_of(scores, chosen)) if scores else None
    outcomes = {part.name: Outcome.read(out / "training" / f"{part.name}.json") for part in chosen}
    known = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    findings = Findings(config, chosen, table, tasks, known, missing, total_seconds(out, time.monotonic() - began))
    report = write_report(findings, out)
    lines = [table.text()] if table is not None else []
    lines += [f"{name} is missing: {why}" for name, why in missing.items()]
    return "\n".join([*lines, f"the report is {report}"])


def jobs_of(config: StudyConfig, waiting: list[Part]) -> int:
    """How many runs train at the same time: one for each core, as a small model gains little from a second."""
    if config.jobs is not None:
        return config.jobs
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    return max(1, min(torch.get_num_threads(), len(waiting))) if on_cpu else 1


def measure_of(config: StudyConfig, part: Part) -> Measure:
    """What is measured of every run."""
    length = part.settings.length
    return Measure(
        lengths=sorted(set(config.lengths or [length * times for times in MULTIPLES])),
        protocol=config.protocol,
        text=config.text or config.data,
        windows=config.windows,
        stride=config.stride,
        rope=config.rope,
        tasks=config.tasks,
    )


def measured(part: Part, what: Measure, out: Path, device: str) -> tuple[list[Score], list[TaskScore]]:
    """The scores of a finished run and the picture of its heads, from their files if they are of this model."""
    assert part.run is not None
    final = part.run.final
    weights = [file_hash(path) for path in sorted(final.glob("*.safetensors"))]
    key = json.loads(json.dumps({"measure": dataclasses.asdict(what), "weights": weights}))
    kept, picture = out / "scores" / f"{part.name}.json", out / "maps" / f"{part.name}.png"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    subject = None
    if found.get("key") != key:
        subject = load_subject(final, name=part.name, device=device)
        scores = score_subject(subject, what)
        tasks = [
            score
            for task in what.tasks
            for score in score_task(subject.model, subject.tokenizer, task, what.lengths, name=part.name)
        ]
        found = {
            "key": key,
            "scores": [dataclasses.asdict(score) for score in scores],
            "tasks": [dataclasses.asdict(score) for score in tasks],
        }
        write_atomic(kept, json.dumps(found))
        picture.unlink(missing_ok=True)
    if not picture.exists():
        draw(subject or load_subject(final, name=part.name, device=device), what, picture)
    return [Score.from_json(s) for s in found["scores"]], [TaskScore(**s) for s in found["tasks"]]


def draw(subject: Subject, what: Measure, path: Path) -> None:
    """The final layer's heads on a held-out sequence: the bias, or the scores where nothing is added to them."""
    length = min(subject.length or LONGEST_MAP, LONGEST_MAP)
    text = held_out_text(subject, what)
    # From the middle: the first document often begins with a licence.
    first = max(0, len(text) // 2 - length // 2)
    ids = torch.from_numpy(text.tokens[None, first : first + length].copy()).to(subject.model.device)
    adds = find(subject.model.config.encoding).overrides("bias")
    maps = position_maps(subject.model, ids, layer=-1, what="bias" if adds else "scores")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(maps.figure(), path, force=True)


def rows_of(scores: list[Score], chosen: list[Part]) -> dict[str, str]:
    """The row of each score: its encoding, with the scaling if it has one."""
    found = {}
    for score in scores:
        name, plus, scaling = score.name.partition("+")
        part = next(part for part in chosen if part.name == name)
        found[score.name] = part.encoding + plus + scaling
    return found


def total_seconds(out: Path, now: float) -> float:
    """What all calls of this study took together."""
    path = out / "seconds.json"
    before = json.loads(path.read_text())["seconds"] if path.exists() else 0.0
    write_atomic(path, json.dumps({"seconds": before + now}))
    return float(before + now)
