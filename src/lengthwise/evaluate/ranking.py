"""Documents ranked for queries: by the words that they share (BM25), and how good a ranking is."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lengthwise.evaluate.retrieval_table import RankMetric

DEPTH = 10
"""Ranks that count."""
K1, B = 1.2, 0.75
"""BM25's usual constants."""


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


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", text.lower())


def rank_metrics(scores: NDArray[np.float64], relevant: Sequence[Mapping[int, int]]) -> dict[RankMetric, list[float]]:
    """nDCG, recall and the reciprocal rank of every query within the first ten, of the grades of its documents.

    nDCG is the sum of grades over the logarithms of their ranks, divided by that of the best order (Jarvelin and
    Kekalainen 2002); for recall and the reciprocal rank any grade counts alike.

    Among equal scores a relevant document comes last: a ranking that tells nothing apart gets nothing for it, whatever
    the order of the documents.

    >>> rank_metrics(np.array([[0.1, 0.9, 0.5]]), [{2: 1}])["mrr"]
    [0.5]
    """
    values: dict[RankMetric, list[float]] = {"ndcg": [], "recall": [], "mrr": []}
    discounts = 1 / np.log2(np.arange(2, DEPTH + 2))
    for row, wanted in zip(scores, relevant, strict=True):
        grades = np.zeros(len(row))
        grades[list(wanted)] = list(wanted.values())
        best = np.sort(grades)[::-1][:DEPTH]
        ranked = grades[np.lexsort((grades, -row))[:DEPTH]]
        hits = ranked > 0
        values["ndcg"].append(float(ranked @ discounts[: len(ranked)] / (best @ discounts[: len(best)])))
        values["recall"].append(float(hits.sum() / len(wanted)))
        values["mrr"].append(float(1 / (1 + hits.argmax())) if hits.any() else 0.0)
    return values
