"""What is measured and drawn of the finished runs of a study, each once: record, retrieval, and picture of heads."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lengthwise import __version__
from lengthwise.encodings.registry import find
from lengthwise.evaluate.config import ResolvedEvalConfig
from lengthwise.evaluate.corpus import Corpus
from lengthwise.evaluate.retrieval import EncodedSets, load_for_retrieval, pooling_of, score_bm25, score_retrieval
from lengthwise.evaluate.retrieval_table import RetrievalScore, as_scores
from lengthwise.evaluate.run import Corpora, Measurement, load_for_evaluation
from lengthwise.files import file_hash, read_stored, write_atomic
from lengthwise.inspect import position_maps
from lengthwise.inspect.skipping import skipped_shares
from lengthwise.loading import LoadedModel, load_tokenizer_of, tokenizer_id
from lengthwise.model.stretch.spec import parse_stretch
from lengthwise.origin import origin
from lengthwise.study.record import RunRecord, TrainingSummary, differences, read_outcome, record_key, record_path
from lengthwise.study.runs import StudyRun
from lengthwise.train.setup import read_tokenizer
from lengthwise.views.style import in_few_colours, png

log = logging.getLogger(__name__)
LONGEST_MAP = 512
"""Tokens that heads are drawn for at most, as in the paper."""


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
        longest = max((score.length for score in scores if score.name == run.name and not score.refused), default=None)
        skipped = {} if longest is None else self.skipped(run, longest)
        return RunRecord(
            scores=scores,
            tasks=tasks,
            skipped=skipped,
            training=training,
            outcome=read_outcome(self.out, run),
            weights=self.weights(run),
            born=origin(),
            training_born=run.run.born,
            measuring_seconds=time.monotonic() - began,
        ).write(record_path(self.out, run), self.key(run))

    def skipped(self, run: StudyRun, length: int) -> dict[int, float]:
        """How much of attention's work is left out at a length, a mean over layers; nothing where it cannot be told."""
        model = self.load(run).model
        ids = torch.from_numpy(self.corpus(run).middle(length)[None]).to(model.device)
        try:
            shares = skipped_shares(model, ids)
        except Exception as error:  # whatever it is, as that a pass in one piece needs too much memory
            log.warning("how much %s skips at %s tokens could not be told: %s", run.name, f"{length:,}", error)
            return {}
        return {length: sum(shares) / len(shares)}

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
        about = {"set": self.config.retrieval_set, "texts": self.retrieval_sets.texts.sha256}
        return about | {"lengths": self.config.lengths, "version": __version__}

    def key(self, run: StudyRun) -> dict[str, Any]:
        """What a measurement depends on beside the weights: if any of it changes, the run is measured again."""
        return record_key(run, self.config) | {"text": self.corpus(run).sha256}

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
    content = read_stored(path)
    if content.get("key") != key:
        content = {"key": key} | compute()
        write_atomic(path, json.dumps(content))
    return content
