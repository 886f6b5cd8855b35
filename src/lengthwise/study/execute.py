"""The whole study: train the runs that are missing, measure, draw, report. Started again it continues.

out/runs/           the runs, each as `lengthwise train` leaves it
out/training/       log, time and memory of each run that this study trained itself
out/records/        what the report has of each run: its scores and losses; a run with a record needs no folder
out/retrieval/      with --retrieval: how each run finds documents, once more trained for that
out/maps/           the position maps of each encoding's final layer, with the first seed
out/tuning.json     with --tune: every try of every encoding's learning rates, and which were chosen
out/report.html     the report; report.md the same without pictures, study.json the values
out/rise.png        its figures: the rise, the values by length (lengths.png), the losses (losses.png)
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from lengthwise.data.retrieval import check_set
from lengthwise.data.sources import resolve
from lengthwise.data.storage import open_storage
from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.evaluate.corpus import check_enough_text
from lengthwise.evaluate.retrieval_table import RetrievalScore
from lengthwise.evaluate.run import CAUSAL_OPTIONS
from lengthwise.files import read_stored, write_atomic
from lengthwise.loading import resolve_device
from lengthwise.model.stretch.spec import parse_stretch
from lengthwise.study.beside import check_beside, check_paper
from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import TRAINED_ELSEWHERE, LocalPool, StudyProgress, train_runs
from lengthwise.study.engines import make_engine
from lengthwise.study.evaluator import RunEvaluator
from lengthwise.study.record import RECORDS, RunRecord, TrainingSummary, read_outcome
from lengthwise.study.report import write_report
from lengthwise.study.results import StudyResults
from lengthwise.study.runs import RUNS, StudyRun, contrastive_runs, evaluation_of, study_runs
from lengthwise.study.tune import with_tuned_rates
from lengthwise.study.upload import upload_run
from lengthwise.tasks import find_task
from lengthwise.train.setup import dry_run

log = logging.getLogger(__name__)
SECONDS = "seconds.json"
MEASURE_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, ValueError)


def run_study(config: StudyConfig) -> str:
    """Do it; the table, the runs that are missing, and the report's path."""
    if not config.train and not any((Path(config.out) / name).is_dir() for name in (RUNS, RECORDS)):
        raise FileNotFoundError(
            f"--no-train measures the study in --out, got {config.out!r}, which has neither {RUNS} nor {RECORDS}; "
            "check the name, or leave out --no-train"
        )
    clock = StudyClock(Path(config.out))
    check_paper(config.paper)
    check_beside(config)
    for address, name in ((config.upload, "--upload"), (config.training.token_store, "--token-store")):
        if address is not None:
            open_storage(address, name)
    device = measuring_device(config)
    if config.tune:
        config = with_tuned_rates(config)
    runs = study_runs(config)
    later = contrastive_runs(config, runs)
    for run in (*runs, *later):
        run.check_finished()
    if config.train:
        dry_run(runs[0].config)
    evaluation = checked_evaluation(config, runs[0])
    out = Path(config.out)
    evaluator = RunEvaluator(evaluation, out, device)
    check_enough_text(len(evaluator.corpus(runs[0])), max(evaluation.lengths))
    measured_tokens = evaluation.windows * sum(evaluation.lengths)
    with clock, StudyProgress([*runs, *later], measured_tokens=measured_tokens) as progress:
        # A contrastive run starts from the weights of a masked one, so that a record of that is not enough.
        recorded = set() if later else {run.name for run in runs if evaluator.record(run) is not None}
        for run in (run for run in runs if run.name in recorded):
            progress.recorded(run)
        waiting = [run for run in (*runs, *later) if not run.is_finished and run.name not in recorded]
        for run in waiting if config.train else ():
            if differing := evaluator.record_differences(run):
                log.info("%s is trained again: its record differs in %s", run.name, ", ".join(differing))
        if config.train:

            def report_so_far(run: StudyRun) -> None:
                others = {other.name: "not trained yet" for other in waiting if not other.is_finished}
                results(config, runs, later, evaluator, others, clock, progress)

            def measure(run: StudyRun) -> None:
                with _threads(engine.threads if isinstance(engine, LocalPool) else torch.get_num_threads()):
                    if run in later:
                        evaluator.retrieve(run)
                    else:
                        evaluator.measure(run)
                clock.write()

            # Where others train, this machine is free to measure and report meanwhile. Where it trains itself a run is
            # measured in its own place; on a GPU, whose memory is the next run's, when all have ended.
            is_local = config.engine == "local"
            in_place = is_local and resolve_device(device).type == "cpu"
            with closing(make_engine(config, waiting)) as engine:
                ended = train_runs(
                    waiting,
                    out=out,
                    engine=engine,
                    progress=progress,
                    finished=None if is_local else report_so_far,
                    measure=measure if in_place else None,
                )
            missing = {name: outcome.failure for name, outcome in ended.items() if outcome.failure is not None}
        else:
            missing = {run.name: _why_missing(run, evaluator) for run in waiting}
        for run in (*runs, *later):
            progress.training_done(run)
        every = results(config, runs, later, evaluator, missing, clock, progress)
        for run in (*runs, *later):
            progress.measuring_done(run)
    lines = [every.table.text()] if every.table is not None else []
    lines += [every.retrieval_table.text()] if every.retrieval_table is not None else []
    lines += [f"{name} is missing: {reason}" for name, reason in every.missing.items()]
    lines += [f"the heads of {name} could not be drawn: {reason}" for name, reason in every.undrawn.items()]
    return "\n".join([*lines, f"the report is {out / 'report.html'}"])


def _why_missing(run: StudyRun, evaluator: RunEvaluator) -> str:
    if run.is_being_trained:
        return TRAINED_ELSEWHERE
    differing = ", ".join(evaluator.record_differences(run))
    return "not trained yet" + (f"; its record differs in {differing}" if differing else "")


def measuring_device(config: StudyConfig) -> str:
    """The device that runs are measured on, which is this machine's; an error where they are trained here and it fails.

    Machines of a cluster have GPUs that the one which asks for them may not have.
    """
    device = config.training.device
    if config.engine != "local" and device.startswith("cuda") and not torch.cuda.is_available():
        log.info("runs are measured here on the CPU: this machine has no GPU")
        return "cpu"
    resolve_device(device)
    return device


def results(
    config: StudyConfig,
    runs: list[StudyRun],
    later: list[StudyRun],
    evaluator: RunEvaluator,
    missing: dict[str, str],
    clock: "StudyClock",
    progress: StudyProgress,
) -> StudyResults:
    """Measure and draw the runs that are finished, each once, copy them away, and write the report of them."""
    out = Path(config.out)
    records: dict[str, RunRecord] = {}
    undrawn: dict[str, str] = {}
    retrieval: list[RetrievalScore] = []
    missing = dict(missing)
    for run in runs:
        if run.is_finished:
            progress.start(f"measuring {run.name}")
            try:
                records[run.name] = evaluator.measure(run)
            except MEASURE_ERRORS as error:
                log.warning("%s could not be measured: %s", run.name, error)
                missing[run.name] = f"could not be measured: {error}"
            else:
                clock.write()
                undrawn |= evaluator.draw(run) if run.seed == config.seeds[0] else {}
            missing |= upload(config, run)
        elif (record := evaluator.record(run)) is not None:
            records[run.name] = record
        else:
            continue
        progress.measuring_done(run)
    for run in (run for run in later if run.is_finished):
        progress.start(f"retrieving with {run.name}")
        try:
            retrieval += [] if retrieval else evaluator.bm25(run)
            retrieval += evaluator.retrieve(run)
        except MEASURE_ERRORS as error:
            log.warning("%s could not be measured: %s", run.name, error)
            missing[run.name] = f"could not be measured: {error}"
        missing |= upload(config, run)
        progress.measuring_done(run)
    # Rows in the order of the study's encodings, whichever seeds are there.
    by_encoding = sorted(runs, key=lambda run: config.encodings.index(run.encoding))
    records = {run.name: records[run.name] for run in by_encoding if run.name in records}
    scores = [score for record in records.values() for score in record.scores]
    # Seeds share the row of their encoding; a stretched model, "+yarn:8", has its own.
    rows = {
        score.name: (run.encoding + score.name.removeprefix(run.name), run.seed)
        for run in runs
        if run.name in records
        for score in records[run.name].scores
    }
    trained = {run.name: TrainingSummary.of(run.run.metrics) for run in (*runs, *later) if run.run is not None}
    trained |= {name: record.training for name, record in records.items()}
    outcomes = {run.name: read_outcome(out, run) for run in (*runs, *later)}
    outcomes |= {name: record.outcome for name, record in records.items()}
    every = StudyResults(
        config=config,
        runs=runs,
        table=LengthTable(scores, rows=rows) if scores else None,
        tasks=[score for record in records.values() for score in record.tasks],
        outcomes={name: outcome for name, outcome in outcomes.items() if outcome is not None},
        missing=missing,
        undrawn=undrawn,
        seconds=clock.seconds,
        later=later,
        retrieval=retrieval,
        skipped={name: record.skipped for name, record in records.items()},
        trained={name: summary for name, summary in trained.items() if summary is not None},
        records=records,
    )
    write_report(every, out)
    return every


def upload(config: StudyConfig, run: StudyRun) -> dict[str, str]:
    """Copy a finished run to where the study wants it, if anywhere; the reason by what is missing if that fails."""
    if config.upload is None or run.run is None:
        return {}
    try:
        log.info("%s is at %s", run.name, upload_run(run.run, config.upload))
    except Exception as error:  # whatever a storage raises: the next study copies it
        log.warning("%s could not be uploaded: %s", run.name, error)
        return {f"the copy of {run.name}": str(error)}
    return {}


def checked_evaluation(config: StudyConfig, run: StudyRun) -> ResolvedEvalConfig:
    """What is measured of every run, checked before anything is trained."""
    evaluation = evaluation_of(config, run)
    resolve(evaluation.text)
    if config.training.objective == "mlm" and (ignored := evaluation.changed(CAUSAL_OPTIONS)):
        raise ValueError(f"{', '.join(ignored)}: for models that predict the next token, got --objective mlm")
    if evaluation.retrieval:
        check_set(evaluation.retrieval_set)
    for task in evaluation.tasks:
        find_task(task)
    for spec in evaluation.stretch:
        parse_stretch(spec)
    return evaluation


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads; torch sets them for the whole process, so they are set back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StudyClock:
    """The time of all calls of a study, in a file that is written with every record: interrupted calls count too."""

    def __init__(self, out: Path) -> None:
        self.path = out / SECONDS
        self.began = time.monotonic()
        self.before = float(read_stored(self.path).get("seconds", 0.0))

    @property
    def seconds(self) -> float:
        """Of this call so far and of all before."""
        return self.before + time.monotonic() - self.began

    def write(self) -> None:
        """To its file."""
        write_atomic(self.path, json.dumps({"seconds": self.seconds}))

    def __enter__(self) -> None:
        self.write()

    def __exit__(self, *error: object) -> None:
        self.write()
