"""The whole study: train the runs that are missing, measure, draw, report. Started again it continues.

out/runs/           the runs, each as `lengthwise train` leaves it
out/training/       log, time and memory of each run that this study trained itself
out/scores/         the measurement of each run, with the key of what was measured
out/maps/           the position maps of each encoding's final layer
out/report.html     the report; report.md the same without pictures, study.json the values
"""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lengthwise import __version__
from lengthwise.data.sources import resolve
from lengthwise.encodings.registry import find
from lengthwise.errors import check_int
from lengthwise.evaluate import LengthTable, Score
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.evaluate.corpus import Corpus
from lengthwise.evaluate.rope_override import parse_scaling
from lengthwise.evaluate.run import Corpora, load_for_evaluation, score_model, score_tasks
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.files import file_hash, write_atomic
from lengthwise.inspect import position_maps
from lengthwise.loading import LoadedModel, load_tokenizer_of, resolve_device
from lengthwise.study.config import StudyConfig
from lengthwise.study.report import check_paper, write_report
from lengthwise.study.results import StudyResults, TrainingOutcome
from lengthwise.study.runs import StudyRun, study_runs
from lengthwise.tasks import find_task
from lengthwise.train.setup import dry_run
from lengthwise.views.style import save_picture

log = logging.getLogger(__name__)
LENGTH_MULTIPLES = (1, 2, 4, 8, 16)
WINDOWS = 64
LONGEST_MAP = 512
"""Tokens that heads are drawn for at most, as in the paper."""
POLL_SECONDS = 1.0
TRAINED_ELSEWHERE = "another process is training it"
MEASURE_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, ValueError)


def run_study(config: StudyConfig) -> str:
    """Do it; the table, the runs that are missing, and the report's path."""
    began = time.monotonic()
    runs = study_runs(config)
    check_paper(config.paper)
    if config.jobs is not None:
        check_int("jobs", config.jobs)
    resolve_device(config.training.device)
    if config.train:
        dry_run(runs[0].config)
    evaluation = evaluation_of(config, runs[0])
    out = Path(config.out)
    scores: list[Score] = []
    rows: dict[str, str] = {}
    tasks: list[TaskScore] = []
    undrawn: dict[str, str] = {}
    with StudyProgress(runs, evaluation) as progress:
        waiting = [run for run in runs if not run.is_finished]
        if config.train:
            ended = train_runs(waiting, out=out, jobs=parallel_jobs(config, waiting), progress=progress)
            missing = {name: outcome.failure for name, outcome in ended.items() if outcome.failure is not None}
        else:
            missing = {r.name: TRAINED_ELSEWHERE if r.is_being_trained else "not trained yet" for r in waiting}
        for run in runs:
            progress.training_done(run)
        evaluator = RunEvaluator(evaluation, out, config.training.device)
        for run in runs:
            if run.is_finished:
                progress.start(f"measuring {run.name}")
                try:
                    run_scores, run_tasks = evaluator.measure(run)
                except MEASURE_ERRORS as error:
                    log.warning("%s could not be measured: %s", run.name, error)
                    missing[run.name] = f"could not be measured: {error}"
                else:
                    scores += run_scores
                    # Seeds share the row of their encoding; a scaling such as "+yarn8" has its own.
                    rows |= {score.name: run.encoding + score.name.removeprefix(run.name) for score in run_scores}
                    tasks += run_tasks
                    undrawn |= evaluator.draw(run)
            progress.measuring_done(run)
    table = LengthTable(scores, rows=rows) if scores else None
    outcomes = {run.name: outcome for run in runs if (outcome := read_outcome(out, run)) is not None}
    seconds = total_seconds(out, time.monotonic() - began)
    results = StudyResults(config, runs, table, tasks, outcomes, missing, undrawn, seconds)
    report = write_report(results, out)
    lines = [table.text()] if table is not None else []
    lines += [f"{name} is missing: {reason}" for name, reason in missing.items()]
    lines += [f"the heads of {name} could not be drawn: {reason}" for name, reason in undrawn.items()]
    return "\n".join([*lines, f"the report is {report}"])


def parallel_jobs(config: StudyConfig, waiting: list[StudyRun]) -> int:
    """How many runs train at the same time: one for each core, as a small model gains little from a second."""
    if config.jobs is not None:
        return config.jobs
    device = config.training.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return max(1, min(torch.get_num_threads(), len(waiting))) if on_cpu else 1


def evaluation_of(config: StudyConfig, run: StudyRun) -> ResolvedEvalConfig:
    """What is measured of every run, checked before anything is trained."""
    lengths = [run.resolved.length * multiple for multiple in LENGTH_MULTIPLES]
    evaluation = config.evaluation.resolved(lengths=lengths, text=config.training.data, windows=WINDOWS)
    resolve(evaluation.text)
    for task in evaluation.tasks:
        find_task(task)
    for scaling in evaluation.rope:
        parse_scaling(scaling)
    return dataclasses.replace(evaluation, lengths=sorted(set(evaluation.lengths)))


class RunEvaluator:
    """Scores and pictures of finished runs, from their files if they are of these weights, this text and this version.

    The text is tokenised once for all runs with the same tokenizer.
    """

    def __init__(self, config: ResolvedEvalConfig, out: Path, device: str) -> None:
        self.config, self.out, self.device = config, out, device
        self.corpora = Corpora(config)
        self._loaded: tuple[str, LoadedModel] | None = None

    def measure(self, run: StudyRun) -> tuple[list[Score], list[TaskScore]]:
        """The scores of a finished run."""
        key, path = self.key(run), self.out / "scores" / f"{run.name}.json"
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if content.get("key") != key:
            loaded = self.load(run)
            scores = score_model(loaded, self.config, self.corpora, scalings=self.config.rope)
            content = {
                "key": key,
                "scores": [dataclasses.asdict(score) for score in scores],
                "tasks": [dataclasses.asdict(score) for score in score_tasks(loaded, self.config)],
            }
            write_atomic(path, json.dumps(content))
            self.picture(run).unlink(missing_ok=True)
        return [Score.from_json(s) for s in content["scores"]], [TaskScore(**s) for s in content["tasks"]]

    def key(self, run: StudyRun) -> dict[str, Any]:
        """What a measurement depends on: if any of it changes, the run is measured again."""
        weights = [file_hash(path) for path in sorted(self.final(run).glob("*.safetensors"))]
        key = {
            "measure": dataclasses.asdict(self.config),
            "weights": weights,
            "text": self.corpus(run).sha256,
            "version": __version__,
        }
        return dict(json.loads(json.dumps(key)))

    def draw(self, run: StudyRun) -> dict[str, str]:
        """The final layer's heads on held-out text: the bias, or the scores where nothing is added to them.

        The reason by the run's name if they cannot be drawn: the scores stay in the table.
        """
        try:
            if not self.picture(run).exists():
                loaded = self.load(run)
                model, length = loaded.model, min(loaded.train_length or LONGEST_MAP, LONGEST_MAP)
                ids = torch.from_numpy(self.corpus(run).middle(length)[None]).to(model.device)
                biased = find(model.config.schedule[-1].encoding).overrides("bias")
                maps = position_maps(model, ids, layer=-1, quantity="bias" if biased else "scores")
                self.picture(run).parent.mkdir(parents=True, exist_ok=True)
                save_picture(maps.figure(), self.picture(run), force=True)
        except Exception as error:  # whatever it is, a picture is not worth a measurement
            log.warning("the heads of %s could not be drawn: %s", run.name, error)
            return {run.name: str(error)}
        return {}

    def picture(self, run: StudyRun) -> Path:
        """Where the picture of a run's heads is."""
        return self.out / "maps" / f"{run.name}.png"

    def corpus(self, run: StudyRun) -> Corpus:
        """The held-out text in the run's tokens."""
        tokenizer = load_tokenizer_of(self.final(run))
        if tokenizer is None:
            raise FileNotFoundError(f"{self.final(run)} must have the run's tokenizer, got none")
        return self.corpora.read(tokenizer)

    def load(self, run: StudyRun) -> LoadedModel:
        """The run's final model; the last one stays loaded."""
        if self._loaded is None or self._loaded[0] != run.name:
            self._loaded = run.name, load_for_evaluation(self.final(run), name=run.name, device=self.device)
        return self._loaded[1]

    @staticmethod
    def final(run: StudyRun) -> Path:
        """The folder of the run's final model."""
        assert run.run is not None
        return run.run.final


def total_seconds(out: Path, now: float) -> float:
    """The time of all calls of this study together."""
    path = out / "seconds.json"
    before = json.loads(path.read_text())["seconds"] if path.exists() else 0.0
    write_atomic(path, json.dumps({"seconds": before + now}))
    return float(before + now)


def read_outcome(out: Path, run: StudyRun) -> TrainingOutcome | None:
    """The outcome of a run that this study trained, from its file."""
    path = out / "training" / f"{run.name}.json"
    return TrainingOutcome(**json.loads(path.read_text())) if path.exists() else None


def train_runs(
    waiting: list[StudyRun], *, out: Path, jobs: int, progress: "StudyProgress"
) -> dict[str, TrainingOutcome]:
    """Train runs by their own commands, `jobs` at a time, each in a process of its own; how each ended.

    Whatever ends one, the others continue; each has its memory for itself, and its output goes to a log file.
    """
    folder = out / "training"
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(waiting)
    running: list[_TrainingProcess] = []
    ended: dict[str, TrainingOutcome] = {}
    threads = max(1, torch.get_num_threads() // jobs)
    with _exit_on_signals():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    if run.is_being_trained:
                        ended[run.name] = TrainingOutcome(0.0, 0, 0, TRAINED_ELSEWHERE)
                    else:
                        progress.start(f"training {run.name}")
                        running.append(_TrainingProcess(run, folder, threads))
                for child in list(running):
                    if (outcome := child.outcome()) is None:
                        progress.set_steps(child.run, child.run.steps_done)
                        continue
                    running.remove(child)
                    ended[child.run.name] = outcome
                    progress.training_done(child.run)
                    if outcome.failure is not None:
                        log.warning("%s failed: %s", child.run.name, outcome.failure)
                if running:
                    time.sleep(POLL_SECONDS)
        finally:
            # Ctrl-C, SIGTERM, or an error here: the runs make their checkpoints and end; the next study continues.
            for child in running:
                child.process.terminate()
            for child in running:
                child.process.wait()
    return ended


class _TrainingProcess:
    """A run that trains in its own process."""

    def __init__(self, run: StudyRun, folder: Path, threads: int) -> None:
        self.run = run
        self.log = folder / f"{run.name}.log"
        self.threads = threads
        self.began = time.monotonic()
        with self.log.open("w") as output:
            # A group of its own: a terminal's Ctrl-C is for the study, which then signals each run once. A run that
            # gets it twice ends at once, without a checkpoint.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lengthwise.cli", *run.arguments()],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                process_group=0,
            )

    def outcome(self) -> TrainingOutcome | None:
        """How it ended, written to a file too; None while it runs."""
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        failure = None
        if self.process.returncode != 0 or not self.run.is_finished:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            last = lines[-1] if lines else "it printed nothing"
            failure = f"exit code {self.process.returncode}: {last} (see {self.log})"
        # Linux counts kibibytes, macOS bytes.
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        outcome = TrainingOutcome(time.monotonic() - self.began, peak, self.threads, failure)
        self.log.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(outcome)) + "\n")
        return outcome


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal raise SystemExit instead of ending this process alone and leaving runs behind."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
    except ValueError:  # not the main thread, which is the only one that receives signals
        pass
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StudyProgress:
    """One bar over the whole study with the time left, or a line for each stage where there is no terminal.

    Everything counts in steps of training. A measurement counts as the forward passes it needs, a third of a step for
    as many tokens.
    """

    def __init__(self, runs: list[StudyRun], evaluation: ResolvedEvalConfig) -> None:
        self.steps = {run.name: run.resolved.steps for run in runs}
        tokens = evaluation.windows * sum(evaluation.lengths)
        self.measuring_steps = max(1, tokens // (3 * runs[0].resolved.batch_tokens))
        self.done = {run.name: run.steps_done for run in runs}
        self.total = sum(self.steps.values()) + self.measuring_steps * len(runs)
        self.first = sum(self.done.values())
        self.began = time.monotonic()
        self.bar = tqdm(
            total=self.total, initial=self.first, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05
        )

    def __enter__(self) -> "StudyProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def start(self, stage: str) -> None:
        """Show the stage that begins now."""
        self.bar.set_description(stage)
        if self.bar.disable:
            now = sum(self.done.values())
            pace = (now - self.first) / (time.monotonic() - self.began + 1e-9)
            left = f", about {(self.total - now) / pace / 60:.0f} min left" if pace > 1e-3 else ""
            log.info("%s (%d %% done%s)", stage, 100 * now // max(1, self.total), left)

    def set_steps(self, run: StudyRun, steps: int) -> None:
        """The steps that a run has done."""
        self.done[run.name] = steps
        more = sum(self.done.values()) - self.bar.n
        if not self.bar.disable and more > 0:
            self.bar.update(more)

    def training_done(self, run: StudyRun) -> None:
        """The training of a run ended, well or not."""
        self.set_steps(run, self.steps[run.name])

    def measuring_done(self, run: StudyRun) -> None:
        """The measurement of a run ended, well or not."""
        self.set_steps(run, self.steps[run.name] + self.measuring_steps)
