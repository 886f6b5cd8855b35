"""How far a model holds: loss against length under named protocols, scores of tasks, and how sure they are."""

from lengthwise.evaluate.perplexity import score_lengths
from lengthwise.evaluate.rope import with_scaling
from lengthwise.evaluate.score import Score
from lengthwise.evaluate.statistics import Interval, bootstrap, paired_difference
from lengthwise.evaluate.table import LengthTable
from lengthwise.evaluate.text import Text, read_text
from lengthwise.evaluate.windows import PROTOCOLS, Protocol

__all__ = [
    "PROTOCOLS",
    "Interval",
    "LengthTable",
    "Protocol",
    "Score",
    "Text",
    "bootstrap",
    "paired_difference",
    "read_text",
    "score_lengths",
    "with_scaling",
]
