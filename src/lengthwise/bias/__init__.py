"""The additive term of attention, described instead of filled in.

    scores[b, h, i, j] = scale * q[b, h, i] . k[b, h, j] + bias[b, h, i, j]

Filled in, a bias costs memory quadratic in length and pushes attention off every fused kernel. A Bias keeps the few
numbers it is made of: one per distance, one per token, or a function. It is bound to one call, holds that call's
positions or levels, and is asked for by index: row i of the queries, column j of the keys. Causality, windows,
documents and padding belong to the layout and are never part of a bias.

A Bias takes itself apart, into tensors and plain values by name, and is put together again from them: operators,
files, the page and pictures all use that one description. It is a pytree.

base.py has what every kind has; distance.py, level.py and general.py are the kinds, description.py is how one is taken
apart, precision.py in which precision it is computed.
"""

from lengthwise.bias.base import ALL, Axes, Bias, Index, block_peaks
from lengthwise.bias.description import (
    FUNCTIONS,
    KINDS,
    Description,
    Static,
    described,
    rebuild,
    registered,
    registered_name,
)
from lengthwise.bias.distance import Beyond, DistanceBias, LineBias, QueryDistanceBias, Side, picked_columns
from lengthwise.bias.general import DenseBias, FunctionBias, SumBias, flat_terms
from lengthwise.bias.level import Curve, LevelBias
from lengthwise.bias.precision import (
    at_least_float32,
    doubled_sums,
    float64_sums,
    has_float64,
    running_sums,
    two_float_sums,
    two_floats,
    widest_dtype,
    without_autocast,
)

__all__ = [
    "ALL",
    "FUNCTIONS",
    "KINDS",
    "Axes",
    "Beyond",
    "Bias",
    "Curve",
    "DenseBias",
    "Description",
    "DistanceBias",
    "FunctionBias",
    "Index",
    "LevelBias",
    "LineBias",
    "QueryDistanceBias",
    "Side",
    "Static",
    "SumBias",
    "at_least_float32",
    "block_peaks",
    "described",
    "doubled_sums",
    "flat_terms",
    "float64_sums",
    "has_float64",
    "picked_columns",
    "rebuild",
    "registered",
    "registered_name",
    "running_sums",
    "two_float_sums",
    "two_floats",
    "widest_dtype",
    "without_autocast",
]
