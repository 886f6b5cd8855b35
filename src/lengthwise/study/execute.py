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

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lengthwise import __version__
from lengthwise.data.retrieval import check_set
from lengthwise.data.sources import resolve
from lengthwise.data.storage import open_storage
from lengthwise.encodings import PositionError
from lengthwise.encodings.registry import find
from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.evaluate.corpus import Corpus
from lengthwise.evaluate.retrieval import EncodedSets, load_for_retrieval, pooling_of, score_bm25, score_retrieval
from lengthwise.evaluate.retrieval_table import RetrievalScore, as_scores
from lengthwise.evaluate.run import CAUSAL_OPTIONS, Corpora, Measurement, load_for_evaluation
from lengthwise.files import command_line, file_hash, write_atomic
from lengthwise.inspect import position_maps
from lengthwise.inspect.skipping import skipped_shares
from lengthwise.loading import LoadedModel, load_tokenizer_of, resolve_device, tokenizer_id
from lengthwise.model.stretch.spec import parse_stretch
from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import TRAINED_ELSEWHERE, LocalPool, StudyProgress, train_runs
from lengthwise.study.engines import make_engine
from lengthwise.study.record import RunRecord, TrainingSummary, differences, read_outcome, record_path, training_key
from lengthwise.study.report import check_beside, check_paper, write_report
from lengthwise.study.results import StudyResults, origin
from lengthwise.study.runs import StudyRun, contrastive_runs, study_runs
from lengthwise.study.tune import with_tuned_rates
from lengthwise.study.upload import upload_run
from lengthwise.tasks import find_task
from lengthwise.train.setup import dry_run, read_tokenizer
from lengthwise.views.style import in_few_colours, png

log = logging.getLogger(__name__)
LENGTH_MULTIPLES = (1, 2, 4, 8, 16)
WINDOWS = 128
SECONDS = "seconds.json"
LONGEST_MAP = 512
"""Tokens that heads are drawn for at most, as in the paper."""
MEASURE_ERRORS = (ArithmeticError, LookupError, OSError, RuntimeError, ValueError)


def run_study(config: StudyConfig) -> str:
    """Do it; the table, the runs that are missing, and the report's path."""
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
    if config.train:
        dry_run(runs[0].config)
    evaluation = evaluation_of(config, runs[0])
    out = Path(config.out)
    evaluator = RunEvaluator(evaluation, out, device)
    measured_tokens = evaluation.windows * sum(evaluation.lengths)
    with clock, StudyProgress([*runs, *later], measured_tokens=measured_tokens) as progress:
        # A contrastive run starts from the weights of a masked one, so that a record of that is not enough.
        recorded = set() if later else {run.name for run in runs if evaluator.record(run) is not None}
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
            missing = {r.name: TRAINED_ELSEWHERE if r.is_being_trained else "not trained yet" for r in waiting}
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
    evaluator: "RunEvaluator",
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


def evaluation_of(config: StudyConfig, run: StudyRun) -> ResolvedEvalConfig:
    """What is measured of every run, checked before anything is trained."""
    lengths = [run.resolved.length * multiple for multiple in LENGTH_MULTIPLES]
    evaluation = config.evaluation.resolved(lengths=lengths, text=config.training.data, windows=WINDOWS)
    resolve(evaluation.text)
    if config.training.objective == "mlm" and (ignored := evaluation.changed(CAUSAL_OPTIONS)):
        raise ValueError(f"{', '.join(ignored)}: for models that predict the next token, got --objective mlm")
    if evaluation.retrieval:
        check_set(evaluation.retrieval_set)
    for task in evaluation.tasks:
        find_task(task)
    for spec in evaluation.stretch:
        parse_stretch(spec)
    return dataclasses.replace(evaluation, lengths=sorted(set(evaluation.lengths)))


class RunEvaluator:
    """Scores and pictures of finished runs, from their files if they are of these weights, this text and this version.

    The text is tokenised once for all runs with the same tokenizer.
    """

    def __init__(self, config: ResolvedEvalConfig, out: Path, device: str) -> None:
        self.config, self.out, self.device = config, out, device
        self.corpora = Corpora(config)
        self._loaded: tuple[str, LoadedModel] | None = None
        self.retrieval_sets = EncodedSets(config.retrieval_set)

    def record(self, run: StudyRun) -> RunRecord | None:
        """What was measured of a run, if it is of these weights, this training, this text and this version.

        Where the weights are not here, as on another machine than the one that trained them, the rest decides.
        """
        path = record_path(self.out, run)
        record = RunRecord.read(path, self.key(run)) if path.exists() else None
        return None if record is None or (run.is_finished and record.weights != self.weights(run)) else record

    def record_differences(self, run: StudyRun) -> list[str]:
        """In what the record of a run, if there is one, is of something else."""
        path = record_path(self.out, run)
        return differences(path, self.key(run)) if path.exists() else []

    def measure(self, run: StudyRun) -> RunRecord:
        """The scores of a finished run, and how much of attention's work is skipped by length."""
        if (record := self.record(run)) is not None:
            return record
        began = time.monotonic()
        specs = [parse_stretch(spec) for spec in self.config.stretch]
        scores, tasks = Measurement(self.load(run), self.config, self.corpora, specs).run(tasks=False)
        self.picture(run).unlink(missing_ok=True)
        assert run.run is not None
        training = TrainingSummary.of(run.run.metrics)
        if training is None:
            raise ValueError(f"a finished run must have metrics, got none in {run.run.folder}")
        skipped = self.skipped(run)
        return RunRecord(
            scores=scores,
            tasks=tasks,
            skipped=skipped,
            training=training,
            outcome=read_outcome(self.out, run),
            weights=self.weights(run),
            born=origin(run.command) | {"measured_by": command_line()},
            measuring_seconds=time.monotonic() - began,
        ).write(record_path(self.out, run), self.key(run))

    def skipped(self, run: StudyRun) -> dict[int, float]:
        """At the longest length that it takes: how much of attention's work is left out, a mean over layers."""
        model = self.load(run).model
        for length in reversed(self.config.lengths):
            ids = torch.from_numpy(self.corpus(run).middle(length)[None]).to(model.device)
            try:
                shares = skipped_shares(model, ids)
            except PositionError:
                continue
            return {length: sum(shares) / len(shares)}
        return {}

    def retrieve(self, run: StudyRun) -> list[RetrievalScore]:
        """How a finished contrastive run finds documents at every length."""

        def compute() -> dict[str, Any]:
            loaded = load_for_retrieval(str(self.final(run)), name=run.name, device=self.device)
            assert loaded.tokenizer is not None
            texts, pooling = self.retrieval_sets.read(loaded.tokenizer), pooling_of(self.final(run), loaded.model)
            scores = score_retrieval(loaded, texts, self.config.lengths, pooling=pooling)
            return {"scores": list(map(dataclasses.asdict, scores))}

        key = self.retrieval_key() | {"weights": self.weights(run)}
        return as_scores(stored(self.out / "retrieval" / f"{run.name}.json", key, compute)["scores"])

    def bm25(self, run: StudyRun) -> list[RetrievalScore]:
        """How BM25 finds the same documents, in the tokens of a finished run."""
        tokenizer = self.tokenizer(run)

        def compute() -> dict[str, Any]:
            scores = score_bm25(self.retrieval_sets.read(tokenizer), self.config.lengths)
            return {"scores": list(map(dataclasses.asdict, scores))}

        key = self.retrieval_key() | {"tokenizer": tokenizer_id(tokenizer)}
        return as_scores(stored(self.out / "retrieval" / "BM25.json", key, compute)["scores"])

    def retrieval_key(self) -> dict[str, Any]:
        """What every measurement of retrieval depends on."""
        return {"set": self.config.retrieval_set, "lengths": self.config.lengths, "version": __version__}

    def key(self, run: StudyRun) -> dict[str, Any]:
        """What a measurement depends on beside the weights: if any of it changes, the run is measured again."""
        return {
            "training": training_key(run),
            "measure": dataclasses.asdict(self.config),
            "text": self.corpus(run).sha256,
            "version": __version__,
        }

    def weights(self, run: StudyRun) -> list[str]:
        """The same for the same weights."""
        return [file_hash(path) for path in sorted(self.final(run).glob("*.safetensors"))]

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
                write_atomic(self.picture(run), in_few_colours(png(maps.figure())))
        except Exception as error:  # whatever it is, a picture is not worth a measurement
            log.warning("the heads of %s could not be drawn: %s", run.name, error)
            return {run.name: str(error)}
        return {}

    def picture(self, run: StudyRun) -> Path:
        """Where the picture of a run's heads is."""
        return self.out / "maps" / f"{run.name}.png"

    def corpus(self, run: StudyRun) -> Corpus:
        """The held-out text in the run's tokens."""
        return self.corpora.read(self.tokenizer(run))

    def tokenizer(self, run: StudyRun) -> PreTrainedTokenizerBase:
        """The run's own; that of its config where the run is not here."""
        if not run.is_finished:
            return read_tokenizer(run.resolved)
        tokenizer = load_tokenizer_of(self.final(run))
        if tokenizer is None:
            raise FileNotFoundError(f"{self.final(run)} must have the run's tokenizer, got none")
        return tokenizer

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


def stored(path: Path, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The content of a file if it was written with that key; else it is computed and written."""
    key = json.loads(json.dumps(key))
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if content.get("key") != key:
        content = {"key": key} | compute()
        write_atomic(path, json.dumps(content))
    return content


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
        self.before = float(json.loads(self.path.read_text())["seconds"]) if self.path.exists() else 0.0

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
