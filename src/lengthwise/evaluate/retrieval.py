"""Retrieval against the length of documents: nDCG@10, recall@10 and MRR@10, with intervals, and BM25 beside.

A query and a document become vectors: the tokens of each, pooled, of length 1; documents are ranked by cosine. The same
queries meet the same documents at every length, cut or grown to it, so that differences between lengths and between
models are paired. BM25 (Robertson et al. 1994) ranks the same documents by words: what changes for it as well is due to
the text, not to positions.

A model by sentence-transformers is pooled as its 1_Pooling says, one of ours as its config, any other by the mean.
"""

import csv
import io
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lengthwise.data.retrieval import EncodedSet, RetrievalSet, padded, retrieval_set
from lengthwise.encodings import PositionError
from lengthwise.evaluate.config import EvalConfig
from lengthwise.evaluate.losses import BATCH_TOKENS, checked_lengths
from lengthwise.evaluate.run import split_names
from lengthwise.evaluate.statistics import Interval, Sums, bootstrap, paired_difference
from lengthwise.evaluate.table import aligned, markdown
from lengthwise.files import write_atomic
from lengthwise.loading import LoadedModel, LoadError, load_model, resolve_checkpoint, tokenizer_id
from lengthwise.model.encoder import pool_tokens
from lengthwise.model.families import check_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTH = 10
"""Ranks that count."""
BM25 = "BM25"
K1, B = 1.2, 0.75
"""BM25's usual constants."""
KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
"""Parts of a model of sentence-transformers that our vectors have too."""
RankMetric = Literal["ndcg", "recall", "mrr"]
RANK_METRICS: dict[RankMetric, str] = {"ndcg": "nDCG@10", "recall": "recall@10", "mrr": "MRR@10"}


@dataclass(frozen=True)
class RetrievalScore:
    """One model on one set at one length of documents, by query."""

    name: str
    length: int
    set_name: str
    documents: int
    groups: list[str] = field(default_factory=list)
    """What each query belongs to; intervals resample these."""
    ndcg: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    mrr: list[float] = field(default_factory=list)
    seconds: float = 0.0
    refused: str | None = None
    """Why there is no measurement, if there is none."""

    def value(self, metric: RankMetric = "ndcg") -> float:
        """The mean over queries."""
        return float(np.mean(getattr(self, metric))) if not self.refused else math.nan

    def sums(self, metric: RankMetric = "ndcg") -> Sums:
        """By group: the sum over its queries, and how many they are."""
        _, which = np.unique(self.groups, return_inverse=True)
        totals: NDArray[np.float64] = np.bincount(which, weights=getattr(self, metric)).astype(float)
        return totals, np.bincount(which).astype(float)


class RetrievalTable:
    """Rows by name, or of several seeds by what `rows` calls them; columns by length."""

    def __init__(self, scores: Sequence[RetrievalScore], *, rows: dict[str, str] | None = None) -> None:
        if not scores:
            raise ValueError("a table needs at least one score, got none")
        self.scores = list(scores)
        self.lengths = sorted({score.length for score in scores})
        self._cells: dict[tuple[str, int], list[RetrievalScore]] = {}
        for score in scores:
            self._cells.setdefault(((rows or {}).get(score.name, score.name), score.length), []).append(score)
        self.names = list(dict.fromkeys(name for name, _ in self._cells))

    def seeds(self, name: str, length: int) -> list[RetrievalScore]:
        """The scores behind a cell that were not refused."""
        return [score for score in self._cells.get((name, length), []) if not score.refused]

    def value(self, name: str, length: int, metric: RankMetric = "ndcg") -> float:
        """The mean over seeds; NaN where nothing was measured."""
        seeds = self.seeds(name, length)
        return float(np.mean([score.value(metric) for score in seeds])) if seeds else math.nan

    def interval(self, name: str, length: int, metric: RankMetric = "ndcg") -> Interval:
        """Where the value lies in 95 of 100 resamplings of groups of queries and of seeds."""
        return bootstrap([score.sums(metric) for score in self.seeds(name, length)])

    def change(self, name: str, length: int, since: int, metric: RankMetric = "ndcg") -> tuple[float, Interval]:
        """How much more it is at a length than at another, for the same queries."""
        return self._paired(self.seeds(name, length), self.seeds(name, since), metric)

    def difference(self, name: str, other: str, length: int, metric: RankMetric = "ndcg") -> tuple[float, Interval]:
        """How much more one has than another, for the same queries."""
        return self._paired(self.seeds(name, length), self.seeds(other, length), metric)

    def _paired(
        self, first: list[RetrievalScore], second: list[RetrievalScore], metric: RankMetric
    ) -> tuple[float, Interval]:
        if not first or not second or any(score.groups != first[0].groups for score in (*first, *second)):
            raise ValueError("a paired difference needs the same queries in both; measure both in one call")
        return paired_difference(*([score.sums(metric) for score in scores] for scores in (first, second)))

    def rows(self, metric: RankMetric = "ndcg") -> list[list[str]]:
        """A heading and a line a model: the value and its interval."""

        def cell(name: str, length: int) -> str:
            if not self.seeds(name, length):
                return "-"
            low, high = self.interval(name, length, metric)
            return f"{self.value(name, length, metric):.3f} ({low:.3f} to {high:.3f})"

        head = [RANK_METRICS[metric], *(f"{length:,}" for length in self.lengths)]
        return [head, *([name, *(cell(name, n) for n in self.lengths)] for name in self.names)]

    def change_rows(self, since: int, metric: RankMetric = "ndcg") -> list[list[str]]:
        """How much each changes from one length to the longer ones, for the same queries."""
        beyond = [n for n in self.lengths if n > since]
        head = [f"{RANK_METRICS[metric]} since {since:,}", *(f"{n:,}" for n in beyond)]
        return [
            head,
            *([name, *(_signed(self.change, name, n, since, metric) for n in beyond)] for name in self.names),
        ]

    def difference_rows(self, metric: RankMetric = "ndcg") -> list[list[str]]:
        """How much more each has than the model that is best at the longest length, for the same queries."""
        longest = self.lengths[-1]
        models = [name for name in self.names if name != BM25 and self.seeds(name, longest)]
        best = max(models, key=lambda name: self.value(name, longest, metric), default=None)
        others = [name for name in self.names if name != best]
        if best is None or not others:
            return []
        head = [f"{RANK_METRICS[metric]} above {best}", *(f"{n:,}" for n in self.lengths)]
        return [
            head,
            *([name, *(_signed(self.difference, name, best, n, metric) for n in self.lengths)] for name in others),
        ]

    def notes(self) -> list[str]:
        """The set, and the reason for each missing cell."""
        first = next((score for score in self.scores if not score.refused), self.scores[0])
        notes = [
            f"{first.set_name}: {len(first.ndcg):,} queries, {first.documents:,} documents, the same at every length; "
            "95 % intervals"
        ]
        return notes + [f"{s.name} at {s.length:,}: {s.refused}" for s in self.scores if s.refused]

    def text(self) -> str:
        """All metrics, aligned for a terminal, with the notes."""
        return "\n\n".join([*(aligned(self.rows(metric)) for metric in RANK_METRICS), "\n".join(self.notes())])

    def markdown(self) -> str:
        """All metrics as Markdown tables with the notes."""
        tables = "\n\n".join(markdown(self.rows(metric)) for metric in RANK_METRICS)
        return "\n".join([tables, "", *(f"- {note}" for note in self.notes())])

    def csv(self) -> str:
        """A line a cell and metric."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["model", "length", "metric", "value", "low", "high", "seeds", "queries", "refused"])
        for (name, length), scores in self._cells.items():
            for metric in RANK_METRICS:
                seeds = self.seeds(name, length)
                ends = self.interval(name, length, metric) if seeds else (math.nan, math.nan)
                reason = "" if seeds else scores[0].refused
                value = self.value(name, length, metric)
                writer.writerow([name, length, metric, value, *ends, len(seeds), len(scores[0].ndcg), reason])
        return out.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """JSON by query, CSV, Markdown and a figure."""
        from lengthwise.views.style import save_picture

        texts = {
            "retrieval.json": json.dumps([asdict(score) for score in self.scores], indent=1),
            "retrieval.csv": self.csv(),
            "retrieval.md": self.markdown(),
        }
        written = [write_atomic(folder / name, content.rstrip("\n") + "\n") for name, content in texts.items()]
        save_picture(retrieval_figure(self), folder / "retrieval.png", force=True)
        return [*written, folder / "retrieval.png"]


def _signed(paired: Callable[..., tuple[float, Interval]], *arguments: str | int) -> str:
    """A paired difference as the text of a cell; "-" where there is none."""
    try:
        value, interval = paired(*arguments)
    except ValueError:
        return "-"
    return f"{value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def retrieval_figure(table: RetrievalTable, *, train_length: int | None = None) -> "Figure":
    """nDCG@10 against the length of documents, a line a model with its interval, the training length marked."""
    from lengthwise.views.line_plot import Line, lines_figure

    lines = []
    for name in table.names:
        known = [n for n in table.lengths if table.seeds(name, n)]
        if known:
            ends = [table.interval(name, n) for n in known]
            values = [table.value(name, n) for n in known]
            lines.append(Line(name, known, values, [e.low for e in ends], [e.high for e in ends]))
    return lines_figure(
        lines,
        title="nDCG@10 against the length of documents, with 95 % intervals",
        across="tokens of a document",
        up="nDCG@10",
        marked=train_length,
        log=False,
    )


def evaluate_retrieval(
    sources: Sequence[str], config: EvalConfig, *, device: str = "auto", trust_remote_code: bool = False
) -> RetrievalTable:
    """Every model and BM25 on one set at every length."""
    resolved = config.resolved()
    named = split_names(sources)
    sets = EncodedSets(resolved.retrieval_set)
    scores: list[RetrievalScore] = []
    for number, (name, source) in enumerate(named):
        loaded = load_for_retrieval(source, name=name, device=device, trust_remote_code=trust_remote_code)
        assert loaded.tokenizer is not None
        texts = sets.read(loaded.tokenizer)
        if number == 0:
            scores += score_bm25(texts, resolved.lengths)
        scores += score_retrieval(loaded, texts, resolved.lengths, pooling=pooling_of(source, loaded.model))
    return RetrievalTable(scores)


class EncodedSets:
    """A set in the tokens of the last tokenizer: the next model often has the same one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._corpus: RetrievalSet | None = None
        self._last: tuple[str, EncodedSet] | None = None

    def read(self, tokenizer: PreTrainedTokenizerBase) -> EncodedSet:
        """In the tokens of this one."""
        key = tokenizer_id(tokenizer)
        if self._last is None or self._last[0] != key:
            self._corpus = self._corpus or retrieval_set(self.name)
            self._last = key, EncodedSet(self._corpus, tokenizer)
        return self._last[1]


def load_for_retrieval(source: str, *, name: str, device: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """A trained model in float32 with its tokenizer; an error for anything else."""
    loaded = load_model(source, name=name, device=device, dtype=torch.float32, trust_remote_code=trust_remote_code)
    if loaded.tokenizer is None or not loaded.trained:
        raise LoadError(f"expected a trained encoder with its tokenizer, got {source!r}; name a run or a folder")
    return loaded


def pooling_of(source: str | Path, model: PreTrainedModel) -> str:
    """How a model's tokens become one vector: as sentence-transformers' files say, as its config does, or the mean."""
    modules = _sentence_file(source, "modules.json") or []
    others = [part["type"] for part in modules if part["type"].rpartition(".")[2] not in KNOWN_MODULES]
    if others:
        raise LoadError(f"vectors must be pooled and normed tokens, got {source} with {', '.join(others)}")
    stored = _sentence_file(source, "1_Pooling/config.json")
    if stored is None:
        return getattr(model.config, "pooling", "mean")
    mode = stored.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [key for key, on in stored.items() if on is True]
    known = {"cls": "first", "mean": "mean", "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean"}
    chosen = [known[key] for key in modes if key in known]
    if len(chosen) != 1:
        raise LoadError(f"vectors must be pooled by the mean or from the first token, got {source} with {modes}")
    return chosen[0]


def _sentence_file(source: str | Path, name: str) -> Any:
    """The content of one of sentence-transformers' files in a folder or on the hub; None if it is not there."""
    path = cached_file(
        str(resolve_checkpoint(source)),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else json.loads(Path(path).read_text())


def score_retrieval(
    loaded: LoadedModel, texts: EncodedSet, lengths: Sequence[int], *, pooling: str = "mean"
) -> list[RetrievalScore]:
    """One score per length; for a length that the model cannot take the score has the reason."""
    model, padding, scores = loaded.model.eval(), texts.encoder.padding, []
    query_vectors: Tensor | None = None
    for length in checked_lengths(lengths):
        began = time.perf_counter()
        documents = texts.documents(length)
        try:
            check_length(model, length)
            if query_vectors is None:
                query_vectors = text_vectors(model, texts.queries, padding=padding, pooling=pooling)
            vectors = text_vectors(model, documents, padding=padding, pooling=pooling)
        except PositionError as error:
            scores.append(_refused(loaded.name, length, texts.corpus, str(error)))
            continue
        cosines = (query_vectors @ vectors.T).double().cpu().numpy()
        scores.append(_scored(loaded.name, length, texts.corpus, cosines, time.perf_counter() - began))
    return scores


def score_bm25(texts: EncodedSet, lengths: Sequence[int]) -> list[RetrievalScore]:
    """The same queries and documents, ranked by their words."""
    corpus, tokenizer, scores = texts.corpus, texts.encoder.tokenizer, []
    for length in checked_lengths(lengths):
        began = time.perf_counter()
        decoded = (str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)) for ids in texts.documents(length))
        ranked = bm25(corpus.queries, decoded)
        scores.append(_scored(BM25, length, corpus, ranked, time.perf_counter() - began))
    return scores


@torch.no_grad()
def text_vectors(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int] | NDArray[np.int32]],
    *,
    padding: int = 0,
    pooling: str = "mean",
) -> Float[Tensor, "text width"]:
    """A vector of length 1 for each text of token ids, on the CPU; texts of like lengths go together."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    vectors: dict[int, Tensor] = {}
    while order:
        chosen = order[: max(1, BATCH_TOKENS // max(1, len(texts[order[0]])))]
        order = order[len(chosen) :]
        ids, mask = (x.to(model.device) for x in padded([texts[i] for i in chosen], padding))
        x = model.base_model(input_ids=ids, attention_mask=mask.long())[0]
        vectors |= dict(zip(chosen, F.normalize(pool_tokens(x.float(), mask, pooling), dim=-1).cpu(), strict=True))
    return torch.stack([vectors[i] for i in range(len(texts))])


def bm25(queries: Sequence[str], texts: Iterable[str]) -> NDArray[np.float64]:
    """The BM25 score of every text for every query."""
    wanted = {word for query in queries for word in _words(query)}
    sizes: list[int] = []
    having: dict[str, list[tuple[int, int]]] = {word: [] for word in wanted}
    for number, text in enumerate(texts):
        words = _words(text)
        sizes.append(max(1, len(words)))
        for word, count in Counter(word for word in words if word in wanted).items():
            having[word].append((number, count))
    scores = np.zeros((len(queries), len(sizes)))
    discounts = K1 * (1 - B + B * np.array(sizes) / np.mean(sizes))
    # A word's share of every text that has it; of all others it is 0.
    shares: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    for word, places in having.items():
        if places:
            rarity = math.log(1 + (len(sizes) - len(places) + 0.5) / (len(places) + 0.5))
            numbers, counts = np.array(places).T
            shares[word] = numbers, rarity * counts * (K1 + 1) / (counts + discounts[numbers])
    for row, query in enumerate(queries):
        for word in dict.fromkeys(_words(query)):
            if word in shares:
                numbers, share = shares[word]
                scores[row, numbers] += share
    return scores


def rank_metrics(scores: NDArray[np.float64], relevant: Sequence[frozenset[int]]) -> dict[RankMetric, list[float]]:
    """nDCG, recall and the reciprocal rank of every query within the first ten; of equal scores the first counts.

    >>> rank_metrics(np.array([[0.1, 0.9, 0.5]]), [frozenset({2})])["mrr"]
    [0.5]
    """
    values: dict[RankMetric, list[float]] = {"ndcg": [], "recall": [], "mrr": []}
    gains = 1 / np.log2(np.arange(2, DEPTH + 2))
    for row, wanted in zip(scores, relevant, strict=True):
        best = np.argsort(-row, kind="stable")[:DEPTH]
        hits = np.array([int(document) in wanted for document in best], dtype=float)
        values["ndcg"].append(float((hits * gains[: len(hits)]).sum() / gains[: len(wanted)].sum()))
        values["recall"].append(float(hits.sum() / len(wanted)))
        values["mrr"].append(float(1 / (1 + hits.argmax())) if hits.any() else 0.0)
    return values


def _scored(
    name: str, length: int, corpus: RetrievalSet, scores: NDArray[np.float64], seconds: float
) -> RetrievalScore:
    ranks = rank_metrics(scores, corpus.relevant)
    ndcg, recall, mrr = ranks["ndcg"], ranks["recall"], ranks["mrr"]
    groups, documents = list(corpus.groups), len(corpus.documents)
    return RetrievalScore(name, length, corpus.name, documents, groups, ndcg, recall, mrr, seconds)


def _refused(name: str, length: int, corpus: RetrievalSet, reason: str) -> RetrievalScore:
    return RetrievalScore(name, length, corpus.name, len(corpus.documents), refused=reason)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", text.lower())


def as_scores(stored: Sequence[dict[str, Any]]) -> list[RetrievalScore]:
    """Scores that were written as plain values."""
    return [RetrievalScore(**score) for score in stored]
