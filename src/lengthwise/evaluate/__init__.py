"""How far a model holds: loss against length under named protocols, scores of tasks, and confidence intervals."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lengthwise.evaluate.config import PROTOCOLS, EvalConfig, Protocol
    from lengthwise.evaluate.corpus import Corpus, read_corpus
    from lengthwise.evaluate.losses import score_lengths
    from lengthwise.evaluate.retrieval import evaluate_retrieval
    from lengthwise.evaluate.retrieval_table import RetrievalTable
    from lengthwise.evaluate.run import Evaluation, evaluate_models
    from lengthwise.evaluate.score import Score
    from lengthwise.evaluate.statistics import Interval, bootstrap, paired_difference
    from lengthwise.evaluate.table import LengthTable

_HOMES = {
    "PROTOCOLS": "config",
    "Corpus": "corpus",
    "EvalConfig": "config",
    "Evaluation": "run",
    "Interval": "statistics",
    "LengthTable": "table",
    "Protocol": "config",
    "RetrievalTable": "retrieval_table",
    "Score": "score",
    "bootstrap": "statistics",
    "evaluate_models": "run",
    "evaluate_retrieval": "retrieval",
    "paired_difference": "statistics",
    "read_corpus": "corpus",
    "score_lengths": "losses",
}
"""Where each public name lives. torch is loaded with the first one: the command line needs only the config."""

__all__ = [
    "PROTOCOLS",
    "Corpus",
    "EvalConfig",
    "Evaluation",
    "Interval",
    "LengthTable",
    "Protocol",
    "RetrievalTable",
    "Score",
    "bootstrap",
    "evaluate_models",
    "evaluate_retrieval",
    "paired_difference",
    "read_corpus",
    "score_lengths",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lengthwise.evaluate.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lengthwise.evaluate' has no attribute {name!r}")
