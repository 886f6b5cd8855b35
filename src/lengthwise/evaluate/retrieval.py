"""Retrieval against the length of documents: nDCG@10, recall@10 and MRR@10, with intervals, and BM25 beside.

A query and a document become vectors: the tokens of each, pooled, of length 1; documents are ranked by cosine. The same
queries meet the same documents at every length, cut or grown to it, so that differences between lengths and between
models are paired. BM25 (Robertson et al. 1994) ranks the same documents by words: what changes for it as well is due to
the text, not to positions.

A model by sentence-transformers is pooled as its 1_Pooling says, one of ours as its config, any other by the mean.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lengthwise.data.retrieval import QUERY_TOKENS, EncodedSet, RetrievalSet, padded, retrieval_set
from lengthwise.encodings import PositionError
from lengthwise.evaluate.config import EvalConfig
from lengthwise.evaluate.losses import checked_lengths
from lengthwise.evaluate.memory import BATCH_TOKENS
from lengthwise.evaluate.ranking import bm25, rank_metrics
from lengthwise.evaluate.retrieval_table import BM25, RetrievalScore, RetrievalTable
from lengthwise.evaluate.run import split_names
from lengthwise.loading import LoadedModel, LoadError, load_model, resolve_checkpoint, tokenizer_id
from lengthwise.model.encoder import pool_tokens
from lengthwise.model.families import check_length, max_length

KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
"""Parts of a model of sentence-transformers that our vectors have too."""


def evaluate_retrieval(
    sources: Sequence[str], config: EvalConfig, *, device: str = "auto", trust_remote_code: bool = False
) -> RetrievalTable:
    """Every model and BM25 on one set at every length."""
    others = {field.name for field in dataclasses.fields(EvalConfig)} - {"lengths", "retrieval", "retrieval_set"}
    if ignored := config.changed(sorted(others)):
        raise ValueError(f"--retrieval takes --lengths and --retrieval-set, got {', '.join(ignored)} too")
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
        self._last: tuple[str, EncodedSet] | None = None

    @cached_property
    def texts(self) -> RetrievalSet:
        """The set itself, read once."""
        return retrieval_set(self.name)

    def read(self, tokenizer: PreTrainedTokenizerBase) -> EncodedSet:
        """In the tokens of this one."""
        key = tokenizer_id(tokenizer)
        if self._last is None or self._last[0] != key:
            self._last = key, EncodedSet(self.texts, tokenizer)
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
    mode = stored.get("pooling_mode", [key for key, on in stored.items() if key.startswith("pooling_mode_") and on])
    modes = [mode] if isinstance(mode, str) else mode
    known = {"cls": "first", "mean": "mean", "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean"}
    if len(modes) != 1 or modes[0] not in known:
        raise LoadError(f"vectors must be pooled by the mean or from the first token, got {source} with {modes}")
    return known[modes[0]]


def _sentence_file(source: str | Path, name: str) -> Any:
    """The content of one of sentence-transformers' files in a folder or on the hub; None if it is not there."""
    checkpoint = resolve_checkpoint(source)
    path = Path(checkpoint) / name
    if not Path(checkpoint).is_dir():
        try:
            path = Path(hf_hub_download(checkpoint, name))
        except LocalEntryNotFoundError:  # no connection; a file that the hub does not have may be known from before
            if try_to_load_from_cache(checkpoint, name) is not _CACHED_NO_EXIST:
                raise LoadError(
                    f"{name} says how vectors are pooled, got no connection to ask {source} for it"
                ) from None
        except EntryNotFoundError:
            return None
    return json.loads(path.read_text()) if path.is_file() else None


def score_retrieval(
    loaded: LoadedModel, texts: EncodedSet, lengths: Sequence[int], *, pooling: str = "mean"
) -> list[RetrievalScore]:
    """One score per length; for a length that the model cannot take the score has the reason.

    Queries are cut where the model's positions end, if that is before QUERY_TOKENS.
    """
    model, padding, scores = loaded.model.eval(), texts.encoder.padding, []
    query_length = min(QUERY_TOKENS, max_length(model) or QUERY_TOKENS)
    query_vectors: Tensor | None = None
    for length in checked_lengths(lengths):
        began = time.perf_counter()
        documents = texts.documents(length)
        try:
            check_length(model, length)
            if query_vectors is None:
                query_vectors = text_vectors(model, texts.queries(query_length), padding=padding, pooling=pooling)
            vectors = text_vectors(model, documents, padding=padding, pooling=pooling)
        except PositionError as error:
            scores.append(_refused(loaded.name, length, texts.corpus, str(error)))
            continue
        cosines = (query_vectors @ vectors.T).cpu().double().numpy()
        if not np.isfinite(cosines).all():
            scores.append(_refused(loaded.name, length, texts.corpus, f"vectors are not finite at {length:,} tokens"))
            continue
        notes = texts.notes(query_length)
        scores.append(_scored(loaded.name, length, texts.corpus, cosines, notes, time.perf_counter() - began))
    return scores


def score_bm25(texts: EncodedSet, lengths: Sequence[int]) -> list[RetrievalScore]:
    """The same queries and documents, cut as for the models, ranked by their words."""

    def decoded(ids: list[int]) -> str:
        return str(texts.encoder.tokenizer.decode(ids, skip_special_tokens=True))

    queries, scores = [decoded(ids) for ids in texts.queries()], []
    for length in checked_lengths(lengths):
        began = time.perf_counter()
        ranked = bm25(queries, (decoded(ids.tolist()) for ids in texts.documents(length)))
        scores.append(_scored(BM25, length, texts.corpus, ranked, texts.notes(), time.perf_counter() - began))
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


def _scored(
    name: str, length: int, corpus: RetrievalSet, scores: NDArray[np.float64], notes: list[str], seconds: float
) -> RetrievalScore:
    scores[[*corpus.own], [*corpus.own.values()]] = -np.inf
    ranks = rank_metrics(scores, corpus.relevant)
    ndcg, recall, mrr = ranks["ndcg"], ranks["recall"], ranks["mrr"]
    groups, documents = list(corpus.groups), len(corpus.documents)
    return RetrievalScore(name, length, corpus.name, documents, groups, ndcg, recall, mrr, seconds, notes)


def _refused(name: str, length: int, corpus: RetrievalSet, reason: str) -> RetrievalScore:
    return RetrievalScore(name, length, corpus.name, len(corpus.documents), refused=reason)
